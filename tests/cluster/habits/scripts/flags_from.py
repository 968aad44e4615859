"""The file of a script that says which phases its training has."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    EASY = "easy"
    HARD = "hard"


class Window(NamedTuple):
    """It is itself as fixed as any tuple, and what is in it is not."""

    scales: list[float]
    name: str
