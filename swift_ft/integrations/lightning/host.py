"""Lightning itself: ``lightning.pytorch`` or ``pytorch_lightning``, whichever the script has imported.

Both are the same code under two names, and a Trainer takes only strategies of its own package. Private parts
of it are used in this folder alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from swift_ft.errors import UsageError

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _root() -> str:
    imported = [name for name in _NAMES if name in sys.modules]
    installed = [name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    for name in (*imported, *installed):
        return name
    raise UsageError("SwiftStrategy is for Lightning's Trainer: pip install 'swift-ft[lightning]'.")


ROOT = _root()


def part(name: str) -> Any:
    """A module of Lightning's, such as ``loops.fetchers``."""
    return importlib.import_module(f"{ROOT}.{name}")
