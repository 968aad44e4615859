"""A script that another program runs within itself, once it has changed what that script will find."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_within(command: Sequence[str]) -> None:
    """Run a script in this process, as Python would.

    Args:
        command: its path, and its arguments.
    """
    sys.argv = [*command]
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
