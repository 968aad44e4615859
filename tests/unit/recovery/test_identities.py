"""A machine keeps its identity where its launcher starts again, and what is known of it with that."""

from __future__ import annotations

import json
from functools import reduce

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Stamped, block_from_text, block_to_text
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.protocol import step
from swift_ft.recovery.snapshot import decoded, encoded
from tests.unit.recovery.test_incidents import incidents
from tests.unit.recovery.test_recoveries import report

OPENED = ev.JobOpened(machines=2)


def joined(name: str, identity: str = "") -> ev.MachineJoined:
    return ev.MachineJoined(machine=name, identity=identity)


def lost(name: str, cause: str = "") -> ev.MachineLost:
    return ev.MachineLost(machine=name, reason="gone", cause=cause)


def after(*events: ev.Event) -> Membership:
    return reduce(step, [OPENED, *events], State()).membership


def test_three_losses_under_three_launchers_put_a_machine_behind_others() -> None:
    losses = [event for name in ("a.0", "b.0", "c.0") for event in (joined(name, "bad/0"), lost(name))]
    known = after(joined("x.0", "good/0"), *losses, joined("y.0", "else/0"))
    assert known.often_lost("c.0") == 3
    known = after(
        *(joined("x.0", "good/0"), *losses, joined("y.0", "else/0")),
        *(joined("d.0", "bad/0"), joined("z.0", "third/0")),
    )
    assert known.waiting() == ["z.0", "d.0"]


def test_two_that_are_there_at_the_same_time_are_two_machines() -> None:
    known = after(joined("a.0", "host/0"), joined("b.0", "host/0"), joined("c.0", "host/0"))
    assert [known.identity_of(name) for name in ("a.0", "b.0", "c.0")] == [
        "host/0",
        "host/0 (2)",
        "host/0 (3)",
    ]
    again = after(
        *(joined("a.0", "host/0"), joined("b.0", "host/0"), joined("c.0", "host/0")),
        *(lost("b.0"), joined("b.1", "host/0"), lost("a.0"), joined("d.0", "host/0")),
    )
    assert again.identity_of("b.1") == "host/0 (2)"
    assert again.identity_of("d.0") == again.identity_of("a.0") == "host/0"
    assert {key: one.count for key, one in again.losses.items()} == {"host/0": 1, "host/0 (2)": 1}


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize(
    ("cause", "counts"),
    [
        *(("", True), (Cause.DEVICE, True), (Cause.NETWORK, False), (Cause.SCRIPT, False)),
        *((Cause.NATIVE, False), (Cause.MEMORY, False), (Cause.SIGNAL, False), (Cause.RUNTIME, False)),
        (Cause.SCHEDULER, False),
    ],
)
def test_only_what_another_machine_would_not_meet_counts(cause: str, counts: bool, spare: bool) -> None:
    more = [joined("c.0", "third/0")] if spare else []
    known = after(
        joined("a.0", "one/0"), joined("b.0", "two/0"), *more, lost("c.0" if spare else "b.0", cause)
    )
    assert [*known.losses] == ([("third/0" if spare else "two/0")] if counts else [])


@pytest.mark.parametrize("cause", [Cause.SCRIPT, Cause.NETWORK, Cause.STORE])
def test_a_newcomer_whose_script_fails_is_no_worse_a_machine(cause: Cause) -> None:
    """It is lost to make room for another one. Its error may be of a file that it lacks, or of a server."""
    events: list[ev.Event] = [
        joined("a.0", "one/0"),
        joined("b.0", "two/0"),
        report(0, 1, None),
        report(1, 1, None),
    ]
    events += [lost("b.0"), joined("c.0", "two/0")]
    known = after(*events, ev.ScriptFailed(machine="c.0", started_in=2, reason="it failed", cause=cause))
    assert "c.0" in known.fenced
    assert known.losses["two/0"].count == 1


def test_an_incident_counts_those_of_the_same_hardware() -> None:
    first, second = (ev.MachineLost(machine=name, reason="silent") for name in ("C", "D"))
    found = incidents(
        *(
            ev.MachineLost(machine="B", reason="gone"),
            joined("C", "bad/0"),
            report(0, 2, 7),
            report(1, 2, None),
        ),
        *(ev.WorkerReady(rank=rank, generation=2) for rank in range(2)),
        *(first, joined("D", "bad/0"), report(0, 3, 8), report(1, 3, None)),
        *(ev.WorkerReady(rank=rank, generation=3) for rank in range(2)),
        *(second, joined("E", "good/0"), report(0, 4, 9), report(1, 4, None)),
        *(ev.WorkerReady(rank=rank, generation=4) for rank in range(2)),
    )
    assert [(one.machines, one.times) for one in found] == [(("B",), 1), (("C",), 1), (("D",), 2)]


def test_a_journal_from_before_identities_is_read() -> None:
    block = (Stamped(joined("m-1.0", "node/0"), 1.0, "agent", "process", 1),)
    old = json.loads(block_to_text(block))
    assert old[0]["same"].pop("identity") == "node/0"
    (read,) = block_from_text(json.dumps(old))
    assert read.event == joined("m-1.0")
    assert after(joined("m-1.0")).identity_of("m-1.3") == "m-1"


def test_a_snapshot_from_before_identities_is_read() -> None:
    known = after(joined("m-1.0"), joined("m-2.0"))
    old = encoded(Membership, known)
    for name in ("identities", "bearers"):
        del old[name]
    assert decoded(Membership, old) == known
