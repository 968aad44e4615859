"""The law of the house: decide < keep < adapt < act < show. Imports go down, and never in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from docs.house import MODULES, ROOT, floor_of, imports_of, own_imports_of

FORBIDDEN = {
    "recovery": {"torch", "threading", "time", "socket", "subprocess", "os", "multiprocessing", "random"},
    "undo": {"torch.distributed", "threading", "time", "socket", "subprocess", "os"},
    "costs": {"torch", "threading", "time", "socket", "subprocess", "multiprocessing"},
    "planning": {"torch", "threading", "time", "socket", "subprocess", "multiprocessing"},
    "logging": {"torch.distributed", "subprocess", "multiprocessing"},
    "storage": {"torch.distributed", "subprocess", "multiprocessing"},
}
"""What a folder must not import: decisions have no I/O, no thread, no clock and no torch.distributed."""


@pytest.mark.parametrize("module", [name for name in MODULES if name])  # all but the front door
def test_imports_go_down(module: str) -> None:
    floor = floor_of(module)
    upward = {name for name in own_imports_of(MODULES[module]) if name and floor_of(name) > floor}
    assert not upward, f"{module} imports {sorted(upward)} from above"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: own_imports_of(path) - {""} for name, path in MODULES.items() if name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these files import each other in a circle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in FORBIDDEN])
def test_what_decides_and_keeps_stays_pure(module: str) -> None:
    forbidden = FORBIDDEN[module.split(".")[0]]
    used = {i for i in imports_of(MODULES[module]) for f in forbidden if i == f or i.startswith(f + ".")}
    assert not used, f"{module} imports {sorted(used)}"


def test_what_acts_imports_no_testing_code() -> None:
    for module, path in MODULES.items():
        if module.split(".")[0] in ("runtime", "launch", "coordination", "session", "cli"):
            assert not {name for name in own_imports_of(path) if name.startswith("testing")}, module


def files_of(*folders: str) -> list[Path]:
    """All Python files of folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_examples_import_nothing_of_the_project_but_the_package() -> None:
    for path in files_of("examples"):
        others = {name for name in imports_of(path) if name.split(".")[0] in ("benchmarks", "tests")}
        assert not others, f"{path.name} imports {sorted(others)}"


def test_benchmarks_import_no_tests() -> None:
    for path in files_of("benchmarks"):
        others = {name for name in imports_of(path) if name.split(".")[0] == "tests"}
        assert not others, f"{path.relative_to(ROOT)} imports {sorted(others)}"


def test_the_import_path_is_changed_where_a_script_is_started_and_nowhere_else() -> None:
    changed = {
        str(path.relative_to(ROOT))
        for path in files_of("swift_ft", "examples", "benchmarks", "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"
    }
    launcher = "tests/support/prefork_server.py"  # becomes what a new interpreter with PYTHONPATH would be
    finder = "swift_ft/program/import_hook.py"  # only reads it
    run_others = {"swift_ft/testing/chaos/planted.py", "tests/support/plain_run.py"}  # scripts in a script
    assert changed == {"swift_ft/launch/main_module.py", finder, launcher, *run_others}
