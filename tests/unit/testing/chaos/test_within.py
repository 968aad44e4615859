"""A script in another program finds what it would find alone, and a session of the kit by whatever name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from swift_ft.testing.chaos import plain, planted
from swift_ft.testing.chaos.run_folder import search_path
from swift_ft.testing.chaos.within import put_in_place


def test_another_object_is_found_under_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a module that has imported it before, under whatever name; and nothing else is replaced."""

    class Session:
        pass

    class Other(Session):
        pass

    home, user = types.ModuleType("home"), types.ModuleType("user")
    made, names = Session(), [Session]
    vars(home).update(Session=Session)
    vars(user).update(Protected=Session, made=made, names=names)
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    put_in_place([(Session, Other)])
    assert (vars(home)["Session"], vars(user)["Protected"]) == (Other, Other)
    assert (vars(user)["made"], vars(user)["names"]) == (made, [Session])


SCRIPT = """
import json, sys
import values  # as a module of the kit is called, too
from pathlib import Path
from swift_ft import Session
from swift_ft.session import Session as Same
from swift_ft.optim import wrap_optimizer
facts = {
    "file": sys.modules["__main__"].__file__, "is main": vars(sys.modules["__main__"]) is globals(),
    "name": __name__, "package": __package__, "arguments": sys.argv[1:], "values": values.WHOSE,
    "session": Session.__name__, "same": Session is Same, "wrapped": wrap_optimizer.__name__,
}
Path("facts.json").write_text(json.dumps(facts))
"""


def run_in(folder: Path, *command: str, ending: str = "") -> tuple[subprocess.CompletedProcess[str], Any]:
    """A program of the kit with a script, and what that has found."""
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SCRIPT + ending)
    (folder / "values.py").write_text("WHOSE = 'the script\\'s'\n")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert (folder / "facts.json").exists(), done.stderr
    return done, json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("as_module", [True, False])
def test_a_script_runs_as_python_would_run_it(as_module: bool, tmp_path: Path) -> None:
    named = ("-m", "package.train") if as_module else ("package/train.py",)
    done, facts = run_in(tmp_path, str(plain.__file__), str(tmp_path), "0", *named, "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert facts == {
        "file": str(tmp_path / "package" / "train.py") if as_module else "package/train.py",
        "is main": True,
        "name": "__main__",
        "package": "package" if as_module else None,
        "arguments": ["--lr", "1"],
        "values": "the script's",
        "session": "PlainSession",
        "same": True,
        "wrapped": "_unwrapped",
    }


@pytest.mark.parametrize(
    ("ending", "code"), [("", 1), ("sys.exit()", 1), ("sys.exit('it has no data')", 1), ("sys.exit(3)", 3)]
)
def test_a_script_without_a_session_has_no_habit(ending: str, code: int, tmp_path: Path) -> None:
    """Its undisturbed run ends with an error, unless it has one of its own."""
    done, facts = run_in(tmp_path, str(planted.__file__), "clamp", "package/train.py", ending=ending)
    assert (done.returncode, facts["session"], facts["same"]) == (code, "Planted", True)
    says = "no habit was planted: omit --habits" in done.stderr
    assert says == (ending in ("", "sys.exit()")), done.stderr


def test_a_module_is_found_from_where_the_tool_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/one:/other")
    assert search_path(("-m", "package.train")) == {"PYTHONPATH": f"{tmp_path}:/one:/other"}
    monkeypatch.delenv("PYTHONPATH")
    assert search_path(("-m", "package.train")) == {"PYTHONPATH": str(tmp_path)}
    assert search_path((str(tmp_path / "train.py"), "-m", "x")) == {}
