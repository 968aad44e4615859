"""Comments and docstrings point at files and names that are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "swift_ft").rglob("*.py")]
THERE = [
    path.relative_to(ROOT).as_posix()
    for folder in ("swift_ft", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
]
FILE = re.compile(r"``?([a-z_/]+\.py)``?")
NAME = re.compile(r":(?:class|func|meth|data|attr|mod):`~?(swift_ft\.[\w.]+)`")
OF_TORCH = {"train.py", "torch/distributed/pipelining/schedules.py"}
"""Of torch, or of nobody: an example."""


def test_files() -> None:
    named = {(path.name, file) for path in FILES for file in FILE.findall(path.read_text())}
    gone = [pair for pair in named if not any(f"/{there}".endswith(f"/{pair[1]}") for there in THERE)]
    assert not [(path, file) for path, file in gone if file not in OF_TORCH]


def test_names() -> None:
    named = {(path.name, name) for path in FILES for name in NAME.findall(path.read_text())}
    assert not [(path, name) for path, name in named if not is_there(name)]


def is_there(name: str) -> bool:
    """Whether a dotted name leads to something: a module, or what is in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            fields = getattr(found, "__annotations__", {})
            if part in fields or part in vars(found):
                found = getattr(found, part, None)
            elif (found := getattr(found, part, None)) is None:
                return False
        return True
    return False
