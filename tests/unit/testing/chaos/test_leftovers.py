"""Only what swift_ft leaves on the host is a leak: a script, and other users, have files of their own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.testing.chaos import leftovers
from swift_ft.testing.chaos.leftovers import left_by, shared_memory

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_SETTLED_S", 0.0)


@pytest.mark.parametrize(
    "name", ["tmpab12cd34", "shards-x1", "matplotlib-7", "joblib_memmapping_folder", "x"]
)
def test_temporary_files_of_a_script_are_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert left_by(tmp_path / "run", tmp_path, shared_memory(), frozenset()).found == []


@pytest.mark.parametrize("name", ["swift-ft-new-1", ".swift-audit-1", "swift-offload-7"])
@pytest.mark.parametrize("own", [None, frozenset[str]()], ids=["undisturbed", "disturbed"])
def test_those_of_the_runtime_are_leaks(tmp_path: Path, name: str, own: frozenset[str] | None) -> None:
    (tmp_path / name).touch()
    found = left_by(tmp_path / "run", tmp_path, shared_memory(), own).found
    assert found == [f"temporary file {name}"]


@pytest.fixture
def kind() -> Iterator[str]:
    """The beginning of names in shared memory that no other test has."""
    made = "".join(letter for letter in uuid.uuid4().hex if letter.isalpha()) + "_"
    yield made
    for path in SHARED_MEMORY.glob(f"{made}*"):
        path.unlink()


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no shared memory in files here")
def test_shared_memory_that_an_undisturbed_run_leaves_is_the_scripts(tmp_path: Path, kind: str) -> None:
    before = shared_memory()
    (SHARED_MEMORY / f"{kind}12af").touch()
    undisturbed = left_by(tmp_path / "run", tmp_path, before, None)
    assert undisturbed.found == []
    assert kind in undisturbed.kinds
    before = shared_memory()
    (SHARED_MEMORY / f"{kind}77ce").touch()
    assert left_by(tmp_path / "run", tmp_path, before, undisturbed.kinds).found == []
    assert f"/dev/shm/{kind}77ce" in left_by(tmp_path / "run", tmp_path, before, frozenset()).found


@pytest.mark.skipif(not SHARED_MEMORY.is_dir() or os.getuid() != 0, reason="root gives files to others")
def test_shared_memory_of_other_users_is_not_looked_at(tmp_path: Path, kind: str) -> None:
    before = shared_memory()
    (SHARED_MEMORY / f"{kind}1").touch()
    assert f"{kind}1" in shared_memory()
    os.chown(SHARED_MEMORY / f"{kind}1", 12345, 12345)
    assert left_by(tmp_path / "run", tmp_path, before, frozenset()).found == []
