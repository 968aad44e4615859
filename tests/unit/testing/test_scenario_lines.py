"""The lines of a scenario that are events: what each of them says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swift_ft.recovery import events as ev
from swift_ft.testing.scenario import Scenario, ScenarioError
from swift_ft.testing.scenario.events import _READERS, _said, read_events
from swift_ft.testing.scenario.line import Line

LINES: dict[str, Sequence[ev.Event]] = {
    "unhealthy A": [ev.HealthCheckFailed(machine="A", reason="a fan stands still")],
    "drain A": [ev.DrainRequested(machine="A", asked_by="an operator")],
    "declined A full": [ev.GuestDeclined(machine="A", reason="full")],
    "request-machines A 2,3": [ev.MachinesRequested(machine="A", slots=(2, 3))],
    "came-back A 1": [ev.WorkerCameBack(machine="A", rank=1)],
    "sessionless A ran=7": [ev.SessionlessWorkers(machine="A", generation=1, ran_s=7)],
    "ready 0,2 gen=3": [ev.WorkerReady(rank=0, generation=3), ev.WorkerReady(rank=2, generation=3)],
    "damaged 1 at 20 'it is gone'": [
        ev.CheckpointDamaged(rank=1, generation=1, iteration=20, reason="it is gone")
    ],
    "communication-failed 1": [ev.CommunicationFailed(rank=1, generation=1, reason="connection reset")],
    "persisted 2 at 20 path=p": [
        ev.PartPersisted(rank=2, iteration=20, epoch=1, generation=1, path="p", digest="a digest")
    ],
    "persisted all at 20 path=p named": [
        ev.PartPersisted(rank=rank, iteration=20, epoch=1, generation=1, path="p") for rank in range(4)
    ],
    "committed 20 keep=2 earlier=5,10": [
        ev.CheckpointCommitted(iteration=20, epoch=1, keep=2, earlier=(5, 10))
    ],
    "request-checkpoint 1 at 22": [
        ev.CheckpointRequested(rank=1, iteration=22, generation=1, reason="its log is nearly full")
    ],
    "request-layout 1 at 22 3,1": [ev.LayoutRequested(rank=1, generation=1, iteration=22, layers=(3, 1))],
    "request-shares 1 at 22 3,1": [ev.SharesRequested(rank=1, generation=1, iteration=22, shares=(3, 1))],
    "stopped 0,1 at 22": [ev.LayoutBoundaryReached(rank=rank, generation=1, iteration=22) for rank in (0, 1)],
    "layout-declined 1": [ev.LayoutDeclined(rank=1, generation=1, reason="too little memory")],
    "prepared all": [ev.NextPrepared(rank=rank, world=1) for rank in (0, 1)],
    "request-switch 1 at 22": [ev.SwitchRequested(rank=1, generation=1, iteration=22, world=1)],
    "taken 1 world=4": [ev.StateTaken(rank=1, world=4)],
    "given-up 'no memory'": [ev.ChangeGivenUp(world=1, reason="no memory")],
    "awaiting 2": [ev.GroupAwaited(rank=2, generation=1)],
    "pace 2 2900": [ev.PaceNoted(rank=2, generation=1, iteration=30, permille=2900)],
    "doubted 20 wrong": [ev.CheckpointsDoubted(generation=1, iteration=20, reason="wrong")],
    "finished 3": [ev.WorkerFinished(rank=3, generation=1)],
    "closed code=130": [ev.JobClosed(reason="Ctrl-C", exit_code=130)],
    "inject first": [ev.FaultInjected(fault="first")],
}
"""A line for each row of the table, in a job of four machines with a change of two of them under way."""


@pytest.fixture
def scenario() -> Scenario:
    scenario = Scenario()
    for line in ("open 4", "join A B C D", "report all nothing holds=m", "plan-change A B"):
        scenario.run_line(line)
    assert scenario.state.generation == 1
    return scenario


@pytest.mark.parametrize("text", LINES)
def test_a_line_says_its_event(text: str, scenario: Scenario) -> None:
    line = Line(text)
    assert list(read_events(line.take(), line, scenario.state)) == list(LINES[text])
    line.finish()


def test_each_row_of_the_table_is_read_here() -> None:
    rows = {name for name, reader in _READERS.items() if reader.__qualname__.startswith(_said.__name__)}
    assert rows == {Line(text).take() for text in LINES}


@pytest.mark.parametrize(
    "text", ["damaged 1 on 20", "damaged 1", "ready one", "drain A now", "ready 1 world=2"]
)
def test_a_line_with_other_words_is_refused(text: str, scenario: Scenario) -> None:
    with pytest.raises((ScenarioError, ValueError)):
        scenario.run_line(text)
