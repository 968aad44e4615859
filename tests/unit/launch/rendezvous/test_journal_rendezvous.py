"""The place of a machine, as the journal has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError

from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step_all

FORMED = (ev.JobOpened(machines=1), ev.MachineJoined(machine="a.0"), ev.MachineJoined(machine="b.0"))
CLOSED = ev.JobClosed(reason="over")


@pytest.mark.parametrize(
    ("events", "machine", "error"),
    [
        ((*FORMED, ev.MachineLost(machine="a.0", reason="silent")), "a.0", RendezvousStateError),
        (FORMED, "b.0", RendezvousStateError),  # it is a spare
        ((*FORMED, CLOSED), "a.0", RendezvousClosedError),
    ],
)
def test_a_machine_that_is_to_start_no_workers_waits_for_none(
    events: tuple[ev.Event, ...], machine: str, error: type[Exception]
) -> None:
    """It is told so at once: while its agent waited here, it would neither join again nor end its workers."""
    follower = SimpleNamespace(state=step_all(State(), events))
    fake: Any = SimpleNamespace(follower=follower, machine=machine, started_in=None)
    with pytest.raises(error):
        JournalRendezvous.next_rendezvous(fake)
