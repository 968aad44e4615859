"""The demo of a job that is changed: how long nobody trained, as the run's report tells it."""

from __future__ import annotations

from examples.demo_reshape import Pause, pauses
from swift_ft.recovery.recoveries import Recovery
from swift_ft.recovery.world_changes import WorldChange


def test_changes_and_losses_are_told_in_order() -> None:
    fewer = WorldChange(1, ("A", "B", "C"), "", "", 10.0, iteration=7, stopped=12.0, live=12.5, peers={0: 3})
    fewer.switched = 12.25
    refused = WorldChange(2, ("A", "C"), "", "", 20.0, ended=21.0, given_up="a loss")
    two = WorldChange(3, ("A", "C"), "", "", 30.0, iteration=19, stopped=31.0, live=32.0, peers={0: 1, 1: 4})
    loss = Recovery(["B"], ["power"], [1], detected=21.0, live=23.0, resume=12)
    guest = Recovery(["guest"], ["its world has ended"], [1], detected=31.75, live=32.0, resume=19)
    report = {
        "worlds": [change.to_dict() for change in (fewer, refused, two)],
        "recoveries": [recovery.to_dict() for recovery in (loss, guest)],
    }
    assert pauses(report) == [
        Pause("change to 3 machines", (4, 3), 7, 0.5, 3),
        Pause("a loss: 2 machines for 3 workers", (3, 3), 12, 2.0, 0),
        Pause("change to 2 machines", (3, 2), 19, 1.0, 5),
    ]
