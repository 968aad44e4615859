"""Offers of a state to the next world: which one a worker reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, UnsupportedError
from swift_ft.recovery.job_state import State
from swift_ft.recovery.worlds import Change, OfferedState, World
from swift_ft.runtime.worlds.handover import Handover, _nearest

OFFERED = {
    rank: OfferedState(rank, machine=f"machine {rank}", address=f"host-{rank}:1", digest="")
    for rank in range(4)
}


def read_by(machine: int, holds: list[str], placed: dict[int, tuple[int, ...]] | None = None) -> list[int]:
    """For each worker that offers its state, whose offer the worker of the same number on a machine reads."""
    state: Any = SimpleNamespace(
        round=SimpleNamespace(
            statuses={rank: SimpleNamespace(holds=(what,)) for rank, what in enumerate(holds)}
        ),
        layouts=State().layouts if placed is None else SimpleNamespace(placed=Map(placed)),
    )
    context: Any = SimpleNamespace(machine=f"machine {machine}", rank=machine, world_size=5)
    change = Change(World(), 0, offered=Map(OFFERED))
    found = _nearest(state, change, context)
    return [next(rank for rank, offer in OFFERED.items() if offer == found[each]) for each in range(4)]


def test_replicas_are_read_from_the_own_machine_or_dealt() -> None:
    holds = ["stage 0", "stage 1", "stage 0", "stage 1"]
    assert read_by(0, holds) == [0, 1, 0, 1]
    assert read_by(3, holds) == [2, 3, 2, 3]


def test_a_rank_stays_what_it_was_where_there_are_as_many_workers() -> None:
    """Two workers on each machine: what a script keeps for itself is that of the same rank, also far away."""
    offered = {
        rank: OfferedState(rank, machine=f"machine {rank // 2}", address=f"host:{rank}", digest="")
        for rank in range(4)
    }
    statuses = {rank: SimpleNamespace(holds=("model",)) for rank in range(4)}
    state: Any = SimpleNamespace(round=SimpleNamespace(statuses=statuses), layouts=State().layouts)
    change = Change(World(), 0, offered=Map(offered))
    for machine, rank in [(0, 0), (0, 1), (1, 2), (1, 3), (1, 0)]:
        context: Any = SimpleNamespace(machine=f"machine {machine}", rank=rank, world_size=4)
        assert {offer.rank for offer in _nearest(state, change, context).values()} == {rank}


def test_layers_decide_where_pipelines_are_unlike() -> None:
    """A pipeline of one stage and one of three: each of their stages may be the first one."""
    placed = {0: (0, 1, 2), 1: (0,), 2: (1,), 3: (2,)}
    assert read_by(2, ["stage 0"] * 4, placed) == [0, 1, 2, 3]


def test_workers_with_the_same_layers_are_replicas() -> None:
    placed = {0: (0, 1), 1: (2,), 2: (0, 1), 3: (2,)}
    assert read_by(1, ["stage 0"] * 4, placed) == [2, 1, 2, 1]


def test_after_a_loss_a_replica_stands_in_for_a_lost_worker() -> None:
    """Of five workers two offer: the other shard's holder, and a replica of worker 1 and worker 3."""
    offered = {rank: OFFERED[rank] for rank in (0, 3)}
    held = Map({0: ("a",), 1: ("b",), 2: ("a",), 3: ("b",), 4: ("c",)})
    change = Change(World(), 0, offered=Map(offered), held=held, sources=(0, 3))
    context: Any = SimpleNamespace(machine="machine 0", rank=0, world_size=2)
    found = _nearest(State(), change, context)
    assert found == {0: OFFERED[0], 1: OFFERED[3], 2: OFFERED[0], 3: OFFERED[3]}


def test_after_a_loss_the_nearest_is_read_though_as_many_offer_as_follow() -> None:
    """Of four replicas the second is lost: the next world's three workers have other ranks than before."""
    offered = {rank: OFFERED[rank] for rank in (0, 2, 3)}
    held = Map(dict.fromkeys(range(4), ("model",)))
    change = Change(World(), 0, offered=Map(offered), held=held, sources=(0, 2, 3))
    for rank, machine in enumerate((0, 2, 3)):
        context: Any = SimpleNamespace(machine=f"machine {machine}", rank=rank, world_size=3)
        assert {offer.rank for offer in _nearest(State(), change, context).values()} == {machine}


class Counter:
    """Of the script, with a value to save."""

    value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        if self.value is None:
            raise KeyError("value")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(("value", "kind"), [(lambda: 0, UnsupportedError), (None, CheckpointError)])
def test_a_state_that_cannot_be_saved_is_not_offered(value: Any, kind: type[Exception]) -> None:
    """A worker's core answers each with the end of the change."""
    counter, nobody = Counter(), cast(Any, None)
    context: Any = SimpleNamespace(rank=1)
    handover = Handover(context, TrainingState({"counter": counter}), nobody, nobody, nobody)
    counter.value = value
    with pytest.raises(kind, match="value"):
        handover.offer(State(), 4)
