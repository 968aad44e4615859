"""The rooms of the package as they are: read from the imports, drawn into the documents.

    python -m docs.house            draws docs/map.md and docs/protocol.md
    python -m docs.house --check    fails if they are not what it would draw

`make lint` holds the imports against the layers in pyproject.toml, and a test holds this map against them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.generated import write_or_check
from swift_ft.recovery.protocol import TRANSITIONS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swift_ft"

ROOMS: dict[str, tuple[str, ...]] = {
    "ground": (
        "errors",
        "units",
        "plain",
        "host",
        "faults",
        "program",
        "network",
        "observe",
        "config",
        "determinism",
        "torch_core",
    ),
    "decide": ("recovery",),
    "keep": ("storage", "undo", "optim", "logging", "costs", "planning"),
    "adapt": ("torch_adapters", "checkpoint", "data"),
    "act": ("coordination", "launch", "runtime", "session", "extend", "integrations"),
    "show": ("offline", "testing", "cli"),
}
"""What each folder and file of the top level is for, from the lowest up. ``[tool.importlinter]`` of
pyproject.toml says which of them may import which."""

PURPOSES = {
    "ground": "what all others stand on",
    "decide": "pure decisions: no I/O, no thread, no clock, no torch",
    "keep": "what outlives a process: files, logs, undo, predictions",
    "adapt": "torch as it is: its private parts, and its state",
    "act": "processes that do what was decided",
    "show": "what a person runs and reads, beside a training",
}


def name_of(path: Path) -> str:
    """A module's dotted name without the package's: ``recovery.plan``, and ``""`` for the front door."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names, type checking included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports: the longest names that are modules."""
    found = set()
    for name in imports_of(path):
        if name == "swift_ft" or name.startswith("swift_ft."):
            own = name.removeprefix("swift_ft").lstrip(".")
            while own not in MODULES:
                own = own.rpartition(".")[0]
            found.add(own)
    return found - {name_of(path)}


# -------------------------------------------------------------------------------------------------- drawing


def documents() -> dict[Path, str]:
    """What is drawn, by its path."""
    return {ROOT / "docs" / "map.md": _map(), ROOT / "docs" / "protocol.md": _protocol()}


def _room_of(module: str) -> str:
    """What the map shows as one box: a folder or a file of the top level."""
    return module.partition(".")[0]


def _map() -> str:
    arrows = _arrows([room for rooms in ROOMS.values() for room in rooms])
    lines = ["flowchart TB"]
    for kind in reversed(ROOMS):
        lines.append(f'  subgraph {kind}["{kind}: {PURPOSES[kind]}"]')
        lines += [f'    {room}["{room}"]' for room in ROOMS[kind]]
        lines.append("  end")
    for room, others in sorted(arrows.items()):
        lines += [f"  {room} --> {other}" for other in sorted(others)]
    return "\n".join(
        [
            "# The map",
            "",
            "Drawn by `python -m docs.house` from the imports. An arrow says that a room imports another;",
            "arrows that follow from others are left out. No arrow goes up, and no folders import each",
            "other in a circle: `make lint` looks (import-linter, by the contracts in `pyproject.toml`).",
            "",
            "```mermaid",
            *lines,
            "```",
            "",
            *_inventory(),
        ]
    )


def _arrows(rooms: list[str]) -> dict[str, set[str]]:
    """Which room imports which, without what follows from other arrows."""
    direct: dict[str, set[str]] = {room: set() for room in rooms}
    for module, path in MODULES.items():
        if module:
            direct[_room_of(module)] |= {_room_of(own) for own in own_imports_of(path) if own}
    direct = {room: others - {room} for room, others in direct.items()}

    def reach(room: str) -> set[str]:
        return direct[room] | {far for other in direct[room] for far in reach(other)}

    return {
        room: {other for other in others if not any(other in reach(third) for third in others - {other})}
        for room, others in direct.items()
    }


def _inventory() -> Iterator[str]:
    for kind in reversed(ROOMS):
        yield f"## {kind}: {PURPOSES[kind]}"
        yield ""
        for room in ROOMS[kind]:
            files = [name for name in MODULES if _room_of(name) == room and MODULES[name].read_text().strip()]
            yield f"**{room}/**" if len(files) > 1 or files != [room] else f"**{room}.py**"
            yield ""
            yield "| file | what it is for |"
            yield "| --- | --- |"
            yield from (f"| `{_shown(name)}` | {_purpose(name)} |" for name in files)
            yield ""


def _shown(module: str) -> str:
    return MODULES[module].relative_to(PACKAGE).as_posix()


def _purpose(module: str) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def _protocol() -> str:
    labels: dict[tuple[str, str], list[str]] = {}
    for (phase, event), following in TRANSITIONS.items():
        for after in sorted(following - {phase}):
            labels.setdefault((phase.value, after.value), []).append(event.__name__)
        if phase in following and (phase.value, event.__name__) in _NEW_GENERATION:
            labels.setdefault((phase.value, phase.value), []).append(event.__name__)
    lines = ["stateDiagram-v2", "  direction LR", "  [*] --> forming", "  ended --> [*]"]
    for (before, then), events in sorted(labels.items()):
        lines.append(f"  {before} --> {then}: {', '.join(sorted(events))}")
    return "\n".join(
        [
            "# The protocol",
            "",
            "Drawn by `python -m docs.house` from the table at the top of `swift_ft/recovery/protocol.py`:",
            "the events that change the phase. The table lists all others, too, and the tests hold it",
            "against what the simulation and the scenarios see.",
            "",
            "```mermaid",
            *lines,
            "```",
            "",
        ]
    )


_NEW_GENERATION = {
    ("agreeing", name)
    for name in ("DeadlinePassed", "MachineLost", "ScriptFailed", "SessionlessWorkers", "StatusReported")
}
"""While AGREEING, these may begin the next generation, which agrees anew."""


if __name__ == "__main__":
    sys.exit(write_or_check("docs.house", __doc__, documents))
