"""The plain session of the test kit, and no waits of the tests' own for copies, which nobody makes there."""

from __future__ import annotations

from swift_ft.testing.chaos import plain
from tests.support import copies


def _no_copies(session: object, completed: int) -> None:
    pass


def put_in_place() -> None:
    """In this process, for what is imported from now on."""
    plain.put_in_place()
    vars(copies)["wait_for_copy"] = _no_copies
