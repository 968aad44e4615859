"""What imports what, where import-linter (`make lint`, the contracts in pyproject.toml) does not look."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from docs.house import MODULES, PACKAGE, ROOMS, ROOT, imports_of

WITHOUT_GROUPS = ("undo", "logging", "storage")
"""Rooms whose code runs without any process group."""


def test_the_map_has_the_rooms_of_the_layers() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    linted = [room for layer in layers for room in layer.split(" | ")]
    assert sorted(linted) == sorted(room for rooms in ROOMS.values() for room in rooms)


def test_all_parts_of_a_worker_are_held_apart() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (apart,) = (contract["modules"] for contract in linter["contracts"] if contract["id"] == "parts")
    folders = {path.parent.name for path in (PACKAGE / "runtime").glob("*/*.py")} - {"worker"}
    assert sorted(apart) == sorted(f"swift_ft.runtime.{name}" for name in folders)


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in WITHOUT_GROUPS])
def test_what_keeps_needs_no_group(module: str) -> None:
    """import-linter knows of torch, but of no part of it."""
    used = {name for name in imports_of(MODULES[module]) if name.startswith("torch.distributed")}
    assert not used, f"{module} imports {sorted(used)}"


def files_of(*folders: str) -> list[Path]:
    """All Python files of folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_lists_of_names_hand_on_what_others_define() -> None:
    """An underscore says already what a module keeps to itself. Public modules list their names."""
    for path in files_of("swift_ft", "benchmarks", "docs"):
        tree = ast.parse(path.read_text())
        lists = [node for node in tree.body if ast.unparse(node).startswith("__all__ = ")]
        if not lists or path.name == "__init__.py" or path.parent == ROOT / "swift_ft":
            continue
        taken = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        assert taken & set(ast.literal_eval(ast.unparse(lists[0]).removeprefix("__all__ = "))), (
            f"{path.relative_to(ROOT)}: its list repeats its underscores"
        )


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
    finder = "swift_ft/program/import_hook.py"  # only reads it
    kit = "swift_ft/testing/chaos"
    launcher = f"{kit}/fork_server.py"  # becomes what a new interpreter with PYTHONPATH would be
    dies = "tests/theirs/scripts/nanogpt_dies.py"
    run_others = {f"{kit}/within.py", "tests/support/plain_run.py", dies}  # scripts in a script
    assert changed == {"swift_ft/launch/processes/main_module.py", finder, launcher, *run_others}
