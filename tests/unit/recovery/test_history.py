"""What a journal says about layers that moved, and about where checkpoints were read."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History


def reports(generation: int, at: int | None) -> list[ev.Event]:
    return [
        ev.StatusReported(
            rank=rank, generation=generation, iteration=at, live=at is not None, stages=(rank,), layers=6
        )
        for rank in range(2)
    ]


def journal(*more: ev.Event) -> list[Entry]:
    events: list[ev.Event] = [
        ev.JobOpened(machines=2),
        ev.MachineJoined(machine="A.0"),
        ev.MachineJoined(machine="B.0"),
        *reports(1, None),
        ev.LayoutRequested(rank=0, generation=1, iteration=7, layers=(1, 5)),
        ev.LayoutBoundaryReached(rank=1, generation=1, iteration=7),
        ev.LayoutBoundaryReached(rank=0, generation=1, iteration=7),
        *reports(2, 7),
        *more,
    ]
    return [Entry(position, event, at=float(position), by="test") for position, event in enumerate(events)]


READY = (ev.WorkerReady(rank=0, generation=2), ev.WorkerReady(rank=1, generation=2, received=480))


def test_a_change() -> None:
    (change,) = History.of(journal(*READY)).layouts
    assert change.to_dict() == {
        "iteration": 7,
        "layers": [1, 5],
        "moves": [{"from": 0, "to": 1, "layers": [1, 2]}],
        "received": {"1": 480},
        "stopped": 6.0,
        "live": 11.0,
    }


def test_a_loss_in_the_middle_is_no_change() -> None:
    lost = ev.MachineLost(machine="A.0", reason="killed")
    assert not History.of(journal(READY[1], lost)).layouts


def test_loads_by_generation() -> None:
    events: list[ev.Event] = [
        ev.WorkerReady(rank=0, generation=1, loaded_own=10),
        ev.WorkerReady(rank=1, generation=1, loaded_peers=4, loaded_store=5),
        ev.WorkerReady(rank=0, generation=2, replayed=3),
        ev.WorkerReady(rank=1, generation=3, loaded_store=7),
    ]
    history = History.of(Entry(i, event, at=float(i), by="test") for i, event in enumerate(events))
    assert [load.to_dict() for load in history.loads] == [
        {"generation": 1, "own_disk": {0: 10, 1: 0}, "peers": {0: 0, 1: 4}, "store": {0: 0, 1: 5}},
        {"generation": 3, "own_disk": {1: 0}, "peers": {1: 0}, "store": {1: 7}},
    ]
