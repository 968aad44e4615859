"""Modules that count as the script's own, for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from swift_ft.program.own_code import is_own_module


@contextmanager
def own_module(folder: Path, name: str, source: str) -> Iterator[ModuleType]:
    """Within the block there is such a module.

    Args:
        folder: for its file.
        name: no other one's.
        source: its text.
    """
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)
        is_own_module.cache_clear()
