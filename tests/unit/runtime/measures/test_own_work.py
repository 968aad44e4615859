"""What a worker takes for its own work: without waits, and not in a replay."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.runtime.measures.part import OwnWork


@dataclass
class Parts:
    """Parts of a worker's runtime that measured something in an iteration."""

    computed_s: float | None
    waited_s: float = 0.0
    since_averages_s: float = 0.0
    dealt: tuple[object, ...] = ()

    def own_work(self) -> OwnWork:
        pipeline: Any = SimpleNamespace(take_computed_s=lambda: self.computed_s)
        replicas: Any = SimpleNamespace(
            take_waited_s=lambda: self.waited_s, take_since_averages_s=lambda: self.since_averages_s
        )
        dealt: Any = self.dealt
        return OwnWork(pipeline if self.computed_s is not None else None, replicas, dealt)


@pytest.mark.parametrize(
    ("parts", "own_s"),
    [
        (Parts(computed_s=None), 8.0),
        (Parts(computed_s=None, waited_s=3.0), 5.0),
        (Parts(computed_s=4.0), 4.0),
        (Parts(computed_s=4.0, waited_s=1.0, since_averages_s=1.0), 3.0),
        (Parts(computed_s=4.0, waited_s=1.0, since_averages_s=1.0, dealt=("batches",)), 2.0),
        (Parts(computed_s=4.0, waited_s=5.0), 0.0),
    ],
)
def test_own_work_is_without_waits(parts: Parts, own_s: float) -> None:
    work = parts.own_work()
    for _ in range(5):
        complete(work, step_s=8.0)
    assert work.medians() == (own_s, 8.0)


def complete(work: OwnWork, step_s: float, *, replayed: bool = False) -> None:
    stats: Any = SimpleNamespace(step_s=step_s)
    work.complete(stats, replayed=replayed)


def test_medians_of_the_last_iterations() -> None:
    work = Parts(computed_s=None).own_work()
    for step_s in (9.0, 1.0, 2.0, 50.0):
        complete(work, step_s)
    complete(work, 100.0, replayed=True)
    assert work.medians() == (None, None)
    complete(work, 3.0)
    assert work.medians() == (3.0, 3.0)
    complete(work, 2.0)
    assert work.medians() == (2.0, 2.0)
    work.forget()
    assert work.medians() == (None, None)
