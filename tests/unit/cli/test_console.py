"""The launcher's console, a process of its own: on a terminal and elsewhere, and what it says of waits."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft.cli.console import WaitTeller
from swift_ft.config.run_config import RunConfig
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.waits import Limit, Wait
from tests.unit.recovery.test_orders import failed_newcomers

TELLER = Path(__file__).parent / "scripts" / "tells_a_story.py"


def story(*flags: str, stderr: int) -> str:
    """The output of a launcher's console about a run that falls back and ends."""
    done = subprocess.run(
        [sys.executable, str(TELLER), *flags], stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=True
    )
    assert not done.stdout
    return (done.stderr or b"").decode()


def test_losses_and_recoveries_are_told_and_summed_up() -> None:
    lines = story(stderr=subprocess.PIPE).splitlines()
    assert all(line.startswith("[swift-run ") for line in lines)
    lost, replaced, fallback, live, incident, summary = (line.partition("] ")[2] for line in lines)
    assert lost == "machine 1 is lost: its agent's connection ended"
    assert replaced == "generation 2: a replacement for machine 1"
    assert fallback.startswith(
        "all workers return to the checkpoint of iteration 40: no other worker has the state of worker 1"
    )
    assert live.startswith("all are live, and go on with iteration 40: back after ")
    assert live.endswith("; worker 0 lost 7 iterations")
    assert incident.startswith(
        "incident 1 on machine 1 (cause: machine): its agent's connection ended. "
        "Training goes on by fallback after "
    )
    assert incident.endswith(
        ", 7 iterations computed again. To do: look at this machine's kernel log, power and hardware"
    )
    assert summary.startswith("1 recovery, ")
    assert summary.endswith(" s, 7 iterations lost")


def test_a_fallback_is_bold_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        os.environ.pop("NO_COLOR", None)
        story(stderr=theirs)
        text = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    bold = [line for line in text.splitlines() if "\x1b[1m" in line]
    assert len(bold) == 1
    assert "all workers return to the checkpoint of iteration 40" in bold[0]


def test_a_quiet_console_says_nothing() -> None:
    assert story("--quiet", stderr=subprocess.PIPE) == ""


# ------------------------------------------------------------------------------------------------------ waits

WAIT = Wait((2, Phase.FORMING, ""), "a replacement for machine 1", Limit.JOIN)


def told(teller: WaitTeller, wait: Wait | None, *times: float) -> list[str]:
    return [text for now in times if (text := teller.tell(wait, now))]


def test_a_wait_is_told_after_ten_seconds_and_then_ever_less_often() -> None:
    teller = WaitTeller(RunConfig(join_timeout_s=600.0))
    assert told(teller, WAIT, *range(100, 245)) == [
        "waits for a replacement for machine 1: 10 s so far, at most 9 min 50 s more (--join-timeout 600)",
        "waits for a replacement for machine 1: 20 s so far, at most 9 min 40 s more (--join-timeout 600)",
        "waits for a replacement for machine 1: 40 s so far, at most 9 min 20 s more (--join-timeout 600)",
        "waits for a replacement for machine 1: 80 s so far, at most 8 min 40 s more (--join-timeout 600)",
    ]


def test_a_pause_of_a_machine_is_added_to_the_limit() -> None:
    teller, state = WaitTeller(RunConfig(join_timeout_s=60.0)), failed_newcomers("m.0", "m.1", "m.2")
    texts = [teller.tell(WAIT, now, state) for now in (100.0, 110.0, 120.0)]
    assert texts == [
        "",
        "waits for a replacement for machine 1 (m: away for 10 s more): 10 s so far, at most 70 s more "
        "(--join-timeout 60)",
        "waits for a replacement for machine 1: 20 s so far, at most 60 s more (--join-timeout 60)",
    ]


def test_another_wait_begins_anew() -> None:
    teller = WaitTeller(RunConfig())
    assert told(teller, WAIT, 0.0, 9.0) == []
    other = Wait((3, Phase.FORMING, ""), "a replacement for machine 2", Limit.JOIN)
    assert told(teller, other, 12.0, 21.0) == []
    assert len(told(teller, other, 22.0)) == 1
    assert told(teller, None, 30.0, 50.0) == []
    assert told(teller, other, 60.0, 69.0) == []


@pytest.mark.parametrize(
    ("wait", "end"),
    [
        (Wait((1, Phase.LIVE, ""), "worker 3"), "worker 3: 10 s so far"),
        (
            Wait((1, Phase.RECOVERING, ""), "worker 3", Limit.REPLAY, until_progress=True),
            "10 s so far, until 5 min 0 s pass without progress (--replay-timeout 300)",
        ),
    ],
)
def test_a_wait_names_its_limit(wait: Wait, end: str) -> None:
    [text] = told(WaitTeller(RunConfig(replay_timeout_s=300.0)), wait, 0.0, 10.0)
    assert text.endswith(end)
