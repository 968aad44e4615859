"""Imports go down only: pure, formats, runtime, command line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "swift_ft"

PURE, FORMATS, RUNTIME, CLI = range(4)

FLOORS = {
    "swift_ft.errors": PURE,
    "swift_ft.planning": PURE,
    "swift_ft.recovery.events": PURE,
    "swift_ft.recovery.job_state": PURE,
    "swift_ft.recovery.ladder": PURE,
    "swift_ft.recovery.orders": PURE,
    "swift_ft.recovery.plan": PURE,
    "swift_ft.recovery.protocol": PURE,
    "swift_ft.recovery.report": PURE,
    "swift_ft.recovery.sharing": PURE,
    "swift_ft.testing.faults": PURE,
    "swift_ft.undo": PURE,
    "swift_ft.config": FORMATS,
    "swift_ft.profile": FORMATS,
    "swift_ft.logging": FORMATS,
    "swift_ft.cli": CLI,
}
"""The longest matching name counts; everything else is runtime."""

FORBIDDEN = {
    PURE: {"torch", "threading", "time", "socket", "subprocess", "os", "multiprocessing", "random"},
    FORMATS: {"torch.distributed", "subprocess", "multiprocessing"},
}

TENSORS = ("swift_ft.undo",)
"""Pure modules that compute with tensors: torch is allowed, torch.distributed is not."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    matches = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return FLOORS[max(matches, key=len)] if matches else RUNTIME


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    module = name_of(path)
    if module == "swift_ft":
        return  # the package's front door names what users need
    known = {name_of(other) for other in MODULES if other.read_text().strip()}  # empty packages are no floor
    upward = {i for i in imports_of(path) & known if floor_of(i) > floor_of(module) and i != "swift_ft"}
    assert not upward, f"{module} is on floor {floor_of(module)} and imports {sorted(upward)} above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_floors_stay_pure(path: Path) -> None:
    module = name_of(path)
    forbidden = FORBIDDEN.get(floor_of(module), set())
    if module.startswith(TENSORS):
        forbidden = forbidden - {"torch"} | {"torch.distributed"}
    used = {i for i in imports_of(path) for f in forbidden if i == f or i.startswith(f + ".")}
    assert not used, f"{module} is on floor {floor_of(module)} and imports {sorted(used)}"
