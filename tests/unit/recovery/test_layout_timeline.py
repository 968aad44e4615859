"""What a journal says about layers that moved."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.layout_timeline import layout_changes


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
    (change,) = layout_changes(journal(*READY))
    assert change.to_dict() == {
        "iteration": 7,
        "layers": [1, 5],
        "moves": [{"from": 0, "to": 1, "layers": [1, 2]}],
        "received": {"1": 480},
        "stopped": 6.0,
        "live": 11.0,
    }


def test_a_loss_in_the_middle_is_no_change() -> None:
    assert not layout_changes(journal(READY[1], ev.MachineLost(machine="A.0", reason="killed")))
