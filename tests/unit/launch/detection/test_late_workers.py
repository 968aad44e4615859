"""An agent asks those of its workers for which all others wait where they are."""

from __future__ import annotations

import selectors
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.config.run_config import RunConfig
from swift_ft.coordination.progress import STANDS, Stand
from swift_ft.launch.detection.late_workers import LateWorkers
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.plain import from_plain
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step
from tests.support.clock import Clock
from tests.unit.recovery.test_recoveries import report

CONFIG = RunConfig(report_timeout_s=300.0, replay_timeout_s=100.0)
BETWEEN_S = 300.0 / timings.LATE_LOOKS
PLACE = "at train.py:3 (load)"


class Late:
    """Machine B with two workers, of ranks 2 and 3, which say where they are when they are asked.

    Worker 0, on machine A, has reported: the script has a session.
    """

    def __init__(self, *, sessions: bool = True) -> None:
        self.clock = Clock()
        self.asked: list[int] = []
        self.place: list[str] = [PLACE]
        self.heard = WorkerChannels(selectors.DefaultSelector())
        for local_rank in range(2):
            channel: Any = None
            stack: Any = SimpleNamespace(ask=partial(self.ask, local_rank))
            self.heard._channels[local_rank], self.heard.stacks[local_rank] = channel, stack
        self.follower = SimpleNamespace(state=State())
        self.go_on(ev.JobOpened(machines=2, workers_per_machine=2))
        self.go_on(ev.MachineJoined(machine="A"), ev.MachineJoined(machine="B"))
        self.go_on(*([report(0, 1, None)] if sessions else []))
        membership: Any = SimpleNamespace(machine="B", follower=self.follower)
        self.late = LateWorkers(membership, self.heard, CONFIG, self.clock)

    def go_on(self, *events: ev.Event) -> None:
        for event in events:
            self.follower.state = step(self.follower.state, event)

    def ask(self, local_rank: int, _limit_s: float) -> list[str]:
        self.asked.append(local_rank)
        return self.place

    def after(self, seconds: float) -> dict[int, Any]:
        """What is shown after so long."""
        self.late.look({0: 2, 1: 3})
        self.clock.now += seconds
        self.late.look({0: 2, 1: 3})
        return self.heard.shown


def test_those_that_have_not_reported_are_asked_before_the_deadline() -> None:
    late = Late()
    late.go_on(report(3, 1, None))
    late.after(0.9 * BETWEEN_S)
    assert late.asked == []
    assert late.late.pause_s == pytest.approx(0.1 * BETWEEN_S)
    shown = late.after(0.1 * BETWEEN_S)
    assert late.asked == [0]
    assert shown[2].items() >= {"iteration": 0, "mode": "starting"}.items()
    assert from_plain(Stand, shown[2][STANDS]).place == PLACE
    for _ in range(timings.LATE_LOOKS - 2):
        late.after(BETWEEN_S)
    assert late.asked == [0] * (timings.LATE_LOOKS - 1)


def test_one_that_does_not_answer_shows_no_place() -> None:
    """Nor does the note of the worker before it, which this replaces."""
    late = Late()
    late.place = []
    shown = late.after(BETWEEN_S)
    assert {rank: facts.get(STANDS) for rank, facts in shown.items()} == {2: None, 3: None}
    late.place = [PLACE]
    at = shown[2]["at"]
    assert late.after(BETWEEN_S)[2][STANDS]["place"] == PLACE
    assert shown[2]["at"] == at
    late.place = []
    assert STANDS not in late.after(BETWEEN_S)[2]


def test_one_that_has_said_so_itself_has_said_more() -> None:
    late = Late()
    own = asdict(Stand(5, PLACE, waits=False, stack=("train.py:3 (load)", "train.py:9 (main)")))
    late.heard.shown[2] = {"iteration": 5, "mode": "live", STANDS: own}
    assert late.after(BETWEEN_S)[2] == {"iteration": 5, "mode": "live", STANDS: own}
    late.place = ["at train.py:7 (main)"]
    assert late.after(BETWEEN_S)[2][STANDS]["place"] == "at train.py:7 (main)"


@pytest.mark.parametrize("gone", ["stacks", "_channels"])
def test_one_that_may_be_no_python_any_more_is_not_asked(gone: str) -> None:
    late = Late()
    setattr(late.heard, gone, {})
    shown = late.after(BETWEEN_S)
    assert late.asked == []
    assert STANDS not in shown[2]


def test_while_all_train_nobody_is_late() -> None:
    late = Late()
    late.go_on(*(report(rank, 1, None) for rank in range(4)))
    late.go_on(*(ev.WorkerReady(rank=rank, generation=1) for rank in range(4)))
    assert late.follower.state.phase == Phase.LIVE
    assert late.after(10 * BETWEEN_S) == {}
    assert late.late.pause_s == float("inf")


def test_a_script_without_a_session_is_not_asked_until_another_one_has_one() -> None:
    """It never reports, and nobody waits for it: each answer would be one more line in its file, for ever."""
    late = Late(sessions=False)
    assert late.after(10 * BETWEEN_S) == {}
    assert late.follower.state.phase == Phase.AGREEING
    assert (late.asked, late.late.pause_s) == ([], float("inf"))
    late.go_on(report(0, 1, None))
    late.after(0.9 * BETWEEN_S)
    assert late.asked == []
    late.after(0.1 * BETWEEN_S)
    assert late.asked == [0, 1]


def test_each_phase_has_a_time_of_its_own() -> None:
    late = Late()
    late.after(0.9 * BETWEEN_S)
    late.go_on(ev.MachineLost(machine="A", reason="gone"), ev.MachineJoined(machine="C"))
    assert late.follower.state.phase == Phase.AGREEING
    late.after(0.9 * BETWEEN_S)
    assert late.asked == []
