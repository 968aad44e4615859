"""Small file systems that a test can fill."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.missing import skip_for_missing


@contextmanager
def mounted_disk(parent: Path, size: str) -> Iterator[Path]:
    """A file system of its own, mounted in a folder. Skips the test where this user may not mount.

    Args:
        parent: where the folder is made.
        size: as mount(8) reads it: ``64m``.
    """
    place = parent / "disk"
    place.mkdir()
    if shutil.which("mount") is None:
        skip_for_missing("mount")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
