"""The agent hears whose fault the end of a script is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.errors import ChangedBatchError, StoreNotWritableError, UsageError
from swift_ft.launch.processes import worker
from swift_ft.launch.processes.worker import WorkerJob


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StoreNotWritableError("the store /s cannot be written: choose another directory"), "store"),
        (ChangedBatchError("iteration 3 got another batch than before"), ""),
        (UsageError("name a store"), ""),
    ],
)
def test_a_store_is_to_blame_for_a_refusal_that_it_causes(
    error: UsageError, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could tell a fault of the store from a script that is refused for what it does."""
    sent: list[dict[str, Any]] = []

    def run_main(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(worker, "run_main", run_main)
    monkeypatch.setattr(worker, "watch_pools", lambda: None)
    channel = SimpleNamespace(send=lambda **facts: sent.append(facts))
    assert worker._run_script(WorkerJob({}, "train.py", ()), cast(Any, channel)) == 2
    (told,) = sent
    assert (told["usage"], told["cause"]) == (True, cause)
