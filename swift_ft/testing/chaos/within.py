"""A script that another program runs within itself, once it has changed what that script will find."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from swift_ft.launch.processes.main_module import run_main

_KIT = str(Path(__file__).parent)
"""Python looks there first, as the program is in it: modules of the script may have the same names."""


def put_in_place(others: Iterable[tuple[Any, Any]]) -> None:
    """Let all modules find other objects in the place of some, also modules that have imported these already.

    Args:
        others: each object, and what is to take its place.
    """
    by_identity = {id(one): (one, other) for one, other in others}
    for module in [*sys.modules.values()]:
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name, value in [*names.items()]:
            if id(value) in by_identity:
                names[name] = by_identity[id(value)][1]


def run_within(command: Sequence[str]) -> None:
    """Run a script in this process, as Python would.

    Args:
        command: its path, or ``-m`` and the name of a module; and its arguments.
    """
    sys.path[:] = [folder for folder in sys.path if folder != _KIT]
    as_module = command[0] == "-m"
    target, *arguments = command[1:] if as_module else command
    run_main(target, arguments, as_module=as_module)
