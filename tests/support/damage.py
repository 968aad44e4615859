"""Damage to a file."""

from __future__ import annotations

from pathlib import Path


def flip(file: Path, at: int | float = 0.5) -> None:
    """Flips one bit: of the byte at this place, or after this fraction of the file."""
    data = bytearray(file.read_bytes())
    data[at if isinstance(at, int) else int(at * len(data))] ^= 1
    file.write_bytes(data)
