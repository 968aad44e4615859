"""How often a session makes memory checkpoints, by what they cost."""

from __future__ import annotations

import json

import pytest
from torch.distributed import HashStore

from swift_ft.runtime.memory import interval as module
from swift_ft.runtime.memory.interval import AUTO, Interval
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.writers import AtOnce


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("copy_s", "send_s", "processor_s", "every"),
    [
        (0.002, 0.1, 0.0, 2),  # a share of 1.5 % of steps of 0.1 s would allow one every 2 iterations
        (0.0, 0.35, 0.0, 7),  # it is on its way half of the time at most
        (0.002, 0.1, 0.01, 15),  # sender and receiver take 20 ms from the training
        (1.0, 0.1, 0.0, 50),  # not less often than the checkpoints in the store
    ],
)
def test_a_session_chooses_by_what_a_copy_costs(
    clock: Clock, copy_s: float, send_s: float, processor_s: float, every: int
) -> None:
    held = HashStore()
    store = RendezvousStore(lambda: held)
    interval = Interval(store, AtOnce(store), AUTO, rank=0, at_most=50)
    interval.copied(copy_s)
    interval.sent(send_s, processor_s)
    for iteration in range(1, 12):
        clock.now += 0.1
        interval.due(iteration)
    assert interval.now == pytest.approx(every, abs=1)
    _, chosen = json.loads(store.get("memory/interval"))
    other = Interval(store, AtOnce(store), AUTO, rank=1, at_most=50)
    other.look()
    assert other.now == chosen
