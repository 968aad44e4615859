"""For tests: faults that happen on purpose, and the suite that a store has to pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_ft.testing.log_store import LogStoreTests

__all__ = ["LogStoreTests"]


def __getattr__(name: str) -> Any:
    # The suite imports pytest, which nobody needs who only trains.
    if name == "LogStoreTests":
        from swift_ft.testing.log_store import LogStoreTests

        return LogStoreTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
