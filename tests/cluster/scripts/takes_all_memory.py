"""Takes memory until the kernel ends the process."""

from typing import NoReturn

_PIECE_BYTES = 64 << 20


def take_all() -> NoReturn:
    held = []
    while True:
        held.append(b"\1" * _PIECE_BYTES)
