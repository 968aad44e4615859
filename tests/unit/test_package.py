"""The wheel: what is in it, and what it says of itself."""

from __future__ import annotations

import email
import tomllib
import zipfile
from email.message import Message

import pytest

from docs.house import PACKAGE, ROOT
from tests.support.built_wheel import build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_all_modules_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if not name.startswith("swift_ft-")}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert inside == modules | {"swift_ft/py.typed", "swift_ft/cli/timeline/page.html"}


def test_commands(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for command, target in PROJECT["scripts"].items():
        assert f"{command} = {target}" in text


def test_what_the_package_says_of_itself(metadata: Message) -> None:
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["License-File"] == "LICENSE"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == set(PROJECT["optional-dependencies"])
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
