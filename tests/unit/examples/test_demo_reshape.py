"""The demo of a job that is changed: how long nobody trained, as the journal tells it."""

from __future__ import annotations

from collections.abc import Sequence

from examples.demo_reshape import Pause, pauses
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.events import Event


def test_a_pause_lasts_from_the_first_stop_until_all_train() -> None:
    opened = [
        ev.JobOpened(machines=2, workers_per_machine=1),
        *(ev.MachineJoined(machine=name, address=f"{name}:1") for name in "AB"),
        *_reports(2, generation=1, iteration=None),
    ]
    change = [
        ev.ChangePlanned(world=1, machines=("B",)),
        ev.NextPrepared(rank=0, world=1),
        ev.SwitchRequested(rank=0, generation=1, iteration=7, world=1),
        *(
            ev.StateOffered(rank=rank, generation=1, iteration=7, address="h:1", folder="f", digest="d")
            for rank in range(2)
        ),
        ev.StateTaken(rank=0, world=1, own=5, peers=3),
        *_reports(1, generation=2, iteration=7),
    ]
    stopped, live = len(opened) + 3, len(opened) + len(change) - 1
    found = pauses(_report([*opened, *change]))
    assert found == [Pause("change to 1 machine", (2, 1), 7, live - stopped, 3)]


def _reports(workers: int, *, generation: int, iteration: int | None) -> list[Event]:
    live = iteration is not None
    return [
        ev.StatusReported(rank=rank, generation=generation, iteration=iteration, live=live, holds=("model",))
        for rank in range(workers)
    ]


def _report(events: Sequence[Event]) -> dict[str, list[dict[str, object]]]:
    """One event each second."""
    return {"events": [Entry(at, event, float(at), "x").to_dict() for at, event in enumerate(events)]}
