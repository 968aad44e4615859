"""What a program is made of, by its text alone; and imports that come from what was kept."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.launch.processes.main_module import search_path
from swift_ft.program import kept_sources as kept_sources_module
from swift_ft.program.discovery import environment_read_by, keep_program, main_source
from swift_ft.program.kept_sources import KeptSources

MAIN = """\
import os, json, torch
import alone
from pkg import part as p
from os import getenv

def later():
    from pkg.deep import below

A = os.environ["A"], os.environ.get("B"), os.getenv("C", "1"), getenv("D"), "E" in os.environ, os.environ
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {
        "main.py": MAIN,
        "alone.py": "VALUE = 1\n",
        "unused.py": "VALUE = 1\n",
        "pkg/__init__.py": "",
        "pkg/part.py": "from . import sibling\nfrom .deep.below import X\n",
        "pkg/sibling.py": "VALUE = 1\n",
        "pkg/deep/below.py": "from ..cousin import X\n",  # a package without __init__.py
        "pkg/cousin.py": "X = 1\n",
        "pkg/__main__.py": "import alone\n",
        "broken.py": "def\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kept_sources_module, "_kept", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def kept_of(target: str, *, as_module: bool = False) -> KeptSources:
    return keep_program(target, search_path(target, as_module=as_module), as_module=as_module)


def test_a_script(program: Path) -> None:
    sources = kept_of(str(program / "main.py"))
    assert {kept.module for kept in sources.all()} == {
        "__main__",
        "alone",
        "pkg",
        "pkg.part",
        "pkg.sibling",
        "pkg.deep.below",
        "pkg.cousin",
    }
    main = main_source(str(program / "main.py"), as_module=False)
    assert main is not None
    assert main.source.decode() == MAIN
    assert environment_read_by() == ["A", "B", "C", "D", "E"]


@pytest.mark.parametrize(("target", "main"), [("pkg", "pkg/__main__.py"), ("pkg.part", "pkg/part.py")])
def test_a_module(target: str, main: str, program: Path) -> None:
    kept_of(target, as_module=True)
    found = main_source(target, as_module=True)
    assert found is not None
    assert found.path == str(program / main)


def test_imports_come_from_what_was_kept(program: Path) -> None:
    kept_of(str(program / "main.py"))
    (program / "alone.py").write_text("VALUE = 2\n")
    (program / "pkg/sibling.py").unlink()
    (program / "unused.py").write_text("VALUE = 2\n")
    from alone import VALUE  # type: ignore[import-not-found]  # the test has made it
    from pkg.sibling import VALUE as OF_SIBLING  # type: ignore[import-not-found]  # as above
    from unused import VALUE as UNUSED  # type: ignore[import-not-found]  # as above

    assert (VALUE, OF_SIBLING, UNUSED) == (1, 1, 2)
    linecache.checkcache()
    assert linecache.getline(str(program / "alone.py"), 1) == "VALUE = 1\n"
    (program / "unused.py").write_text("VALUE = 3\n")
    del sys.modules["unused"]
    from unused import VALUE as AGAIN

    assert AGAIN == 2, "it was kept when it was loaded"


def test_what_is_broken_says_so_when_it_is_imported(program: Path) -> None:
    kept_of(str(program / "main.py"))
    with pytest.raises(SyntaxError, match="broken"):
        __import__("broken")
