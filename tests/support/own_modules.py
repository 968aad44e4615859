"""Modules that count as the script's own, for a test."""

from __future__ import annotations

import importlib.util
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
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.modules.pop(name, None)
        is_own_module.cache_clear()
