"""The last line about a run: its recoveries, or the restarts of a script without a session."""

from __future__ import annotations

import pytest

from swift_ft.cli.words import missed_in_words, summary
from swift_ft.faults import missed_faults
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History

OPENED: list[ev.Event] = [
    ev.JobOpened(machines=2, restarts=2),
    *(ev.MachineJoined(machine=name) for name in "abc"),
]
LOST = ev.MachineLost(machine="b", reason="gone")


def history(*events: ev.Event) -> History:
    return History.of(
        Entry(position, event, float(position), "test") for position, event in enumerate(events)
    )


def ends(a: int, c: int) -> list[ev.Event]:
    return [ev.ScriptExited(machine="a", started_in=a), ev.ScriptExited(machine="c", started_in=c)]


def test_a_good_restart_without_a_session_is_no_recovery_that_did_not_end() -> None:
    found = history(*OPENED, LOST, ev.SessionlessWorkers(machine="a", generation=2), *ends(3, 3))
    assert found.state.verdict is not None
    assert found.state.verdict.ok
    assert summary(found) == (
        "all processes were started again once, as torchrun does it. The script has no swift_ft.Session: "
        "each time all was lost that its own checkpoints lack"
    )


def test_restarts_of_a_script_that_fails_count_too() -> None:
    failed = [
        ev.ScriptFailed(machine="a", started_in=1, reason="ValueError"),
        ev.ScriptFailed(machine="a", started_in=2, reason="ValueError"),
    ]
    assert summary(history(*OPENED, *failed)).startswith("all processes were started again 2 times, ")


@pytest.mark.parametrize("events", [[], [LOST]])
def test_nothing_is_said_where_nothing_was_started_again(events: list[ev.Event]) -> None:
    """A replacement that was started beside a survivor is no restart of all."""
    found = history(*OPENED, *events)
    assert found.state.generation == 1 + len(events)
    assert summary(found) == ""


def test_a_recovery_that_did_not_end_is_told_where_there_is_a_session() -> None:
    began = [ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in range(2)]
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in range(2)]
    found = history(*OPENED, *began, *ready, LOST)
    assert summary(found).endswith(", and one that did not end")


@pytest.mark.parametrize(
    ("fault", "passed", "why"),
    [
        (
            "point=forward",
            ["reduce", "between"],
            "no worker here has passed point=forward, only between, reduce.",
        ),
        (
            "point=reduce bucket=7",
            ["reduce"],
            "passed point=reduce, but not machine 1 in iteration 3 at bucket 7.",
        ),
        (
            "point=reduce",
            [],
            "no worker here has passed any point, and without a swift_ft.Session there are none.",
        ),
    ],
)
def test_a_fault_that_never_struck_is_told_with_the_reason(fault: str, passed: list[str], why: str) -> None:
    text = f"kill machine=1 iteration=3 {fault}"
    (missed,) = missed_faults(
        f"{text}; stop worker=0 iteration=any", ["stop worker=0 iteration=any point=between"]
    )
    told = missed_in_words(missed, passed)
    assert told.startswith(f"--inject '{text}' never struck: ")
    assert f"{why} Omit it, or name another point." in told
