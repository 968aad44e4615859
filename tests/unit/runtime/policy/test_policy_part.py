"""Worker 0's policy: when it looks, what it says, and what it plans."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.next_pipelines import Sizes, is_plan_for
from swift_ft.recovery.policy import Limits, Price
from swift_ft.recovery.protocol import step
from swift_ft.recovery.worlds import OfferedState
from swift_ft.runtime.policy.forecasts import Now, no_forecast, replica_forecast
from swift_ft.runtime.policy.part import Measures, PolicyPart
from swift_ft.runtime.worker.part import StepInfo
from swift_ft.testing.scenario import Scenario
from tests.support.journals import machine
from tests.unit.recovery.test_next_world import live, names

ANY = Limits()


class Journal:
    """A job of which only the state counts."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.planned: list[ev.ChangePlanned] = []

    def append(self, event: ev.Event) -> State:
        assert isinstance(event, ev.ChangePlanned)
        self.planned.append(event)
        self.state = step(self.state, event)
        return self.state


def half_with_three(state: State, now: Now) -> dict[int, int]:
    return {2: now.iteration_ns, 3: now.iteration_ns // 2}


def smaller(*lines: str) -> State:
    """Two pipelines of two stages have lost two machines, and one comes."""
    scenario = Scenario()
    for line in [*SMALLER.splitlines(), *lines]:
        scenario.run_line(line.strip())
    return scenario.state


SMALLER = """
    open 4 on-loss=shrink
    join A B C D
    report 0 nothing stages=0 holds=s0 layers=6 microbatches=8
    report 1 nothing stages=1 holds=s1 layers=6
    report 2 nothing stages=0 holds=s0 layers=6 pipeline=2 microbatches=8
    report 3 nothing stages=1 holds=s1 layers=6 pipeline=2
    lost B
    lost C
    plan-change plan=cuts:6@8/6@8 A D
    prepared all
    report 0 at 0 stages=0 holds=s0 layers=6
    report 3 at 0 stages=1 holds=s1 layers=6 pipeline=2
    offered 0,3 at 0
    taken all
    report 0 at 0 stages=0 holds=a0 layers=6 cut=6 microbatches=8
    report 1 at 0 stages=0 holds=b0 layers=6 pipeline=1 cut=6 microbatches=8
"""


def part(job: Any, *, chooses: bool = True, step_s: float | None = 1.0, limits: Limits = ANY) -> PolicyPart:
    known = None if step_s is None else (step_s, step_s)
    measures = Measures(lambda: known or (None, None), lambda: None, half_with_three)
    return PolicyPart(job, limits, measures, chooses=chooses)


def run(policy: PolicyPart, iterations: range) -> None:
    for iteration in iterations:
        policy.boundary(StepInfo(iteration, 1))


def test_it_plans_what_pays(caplog: pytest.LogCaptureFixture) -> None:
    """Half a second of each iteration is lost by waiting, and a change costs as much: one iteration."""
    job = Journal(live(2, 1))
    with caplog.at_level(logging.INFO):
        run(part(job), range(12))
    (planned,) = job.planned
    assert planned.machines == names(0, 1, 2)
    assert (planned.before_ns, planned.after_ns, planned.cost_ns) == (10**9, 5 * 10**8, 5 * 10**8)
    assert planned.asked_by == "--policy auto"
    (said,) = caplog.records
    assert vars(said)["event"] == "change_chosen"
    assert vars(said)["pays_after"] == 1


def test_a_loss_is_made_good_without_a_policy() -> None:
    """With the plan of pipelines that would have followed one loss."""
    job = Journal(smaller())
    run(part(job, limits=Limits(only_returns=True)), range(12))
    assert not job.planned
    job = Journal(smaller("join E"))
    run(part(job, limits=Limits(only_returns=True)), range(12))
    (planned,) = job.planned
    assert planned.machines == ("D", "A", "E")
    assert is_plan_for(planned.plan, (1, 2), Sizes(6, 16))
    assert (planned.asked_by, planned.before_ns) == ("--on-loss shrink", 0)
    assert job.state.worlds.change is not None
    assert job.state.worlds.change.full == job.state.worlds.full is not None


def test_a_loss_is_made_good_by_the_policy_with_the_layout_of_before() -> None:
    job = Journal(smaller("join E F"))
    run(part(job), range(12))
    (planned,) = job.planned
    assert (planned.machines, planned.plan) == (("A", "E", "F", "D"), "")
    assert (planned.asked_by, planned.before_ns) == ("--policy auto", 10**9)


def test_to_make_a_loss_good_is_advised_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Journal(smaller("join E F"))
    run(part(job, chooses=False), range(40))
    assert not job.planned
    assert [vars(record)["kind"] for record in caplog.records] == ["return"]


def test_it_advises_once_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    job = Journal(live(2, 1))
    run(part(job, chooses=False), range(40))
    assert not job.planned
    assert [vars(record)["event"] for record in caplog.records] == ["change_advised"]


def test_it_says_once_that_a_change_is_too_dear(caplog: pytest.LogCaptureFixture) -> None:
    """Three machines cost more than two if an iteration takes 0.9 s, and less if it takes half a second."""

    def slower(state: State, now: Now) -> dict[int, int]:
        return {2: now.iteration_ns, 3: 9 * now.iteration_ns // 10}

    job: Any = Journal(live(2, 1))
    limits = Limits(price=Price(3.6, 0.001))
    measures = Measures(lambda: (1.0, 1.0), lambda: None, slower)
    run(PolicyPart(job, limits, measures, chooses=True), range(40))
    assert not job.planned
    (said,) = map(vars, caplog.records)
    assert said["event"] == "change_too_dear"
    run(part(job, limits=limits), range(40))
    assert len(job.planned) == 1


def test_nothing_is_said_before_an_iteration_is_measured() -> None:
    job = Journal(live(2, 1))
    run(part(job, step_s=None), range(40))
    assert not job.planned


def test_no_other_change_while_one_is_under_way_and_not_at_once_after_it() -> None:
    job = Journal(live(2, 1))
    policy = part(job)
    run(policy, range(20))
    assert len(job.planned) == 1
    job.state = step(job.state, ev.ChangeGivenUp(world=1, reason="a worker ended"))
    run(policy, range(20, 28))
    assert len(job.planned) == 1
    run(policy, range(28, 33))
    assert [event.world for event in job.planned] == [1, 2]


def test_a_machine_that_leaves_is_seen_at_once() -> None:
    job = Journal(live(2, 1))
    job.state = step(job.state, ev.DrainRequested(machine=machine(0)))
    run(part(job), range(1))
    assert job.planned[0].machines == names(2, 1)


def test_what_came_is_said_beside_the_forecast(caplog: pytest.LogCaptureFixture) -> None:
    job = Journal(live(2, 1))
    before = part(job)
    run(before, range(4))
    state, change = job.state, job.state.worlds.change
    assert change is not None
    offer = OfferedState(0, "host:1", machine(0), "")
    offered = replace(change, offered=change.offered.set(0, offer))
    after = part(job, step_s=0.6)
    after.on_change(replace(state, worlds=replace(state.worlds, change=offered)))
    assert state.plan is not None
    job.state = replace(
        state,
        worlds=replace(state.worlds, present=replace(change.world, since=4), change=None),
        round=replace(state.round, plan=replace(state.plan, resume=4)),
    )
    after.on_change(job.state)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run(after, range(4, 30))
    (said,) = (v for v in map(vars, caplog.records) if v["event"] == "change_compared")
    assert (said["before_s"], said["after_s"], said["came_after_s"]) == (1.0, 0.5, 0.6)
    assert said["iteration"] == 12
    assert said["came_cost_s"] >= 0


def test_replicas_are_forecast_while_all_are_alike() -> None:
    now = Now(iteration_ns=1000, own_ns=600, machines=3)
    assert replica_forecast(live(2, 1), now) == {1: 1600, 2: 1000, 3: 800}
    state = live(2, 1)
    slow = step(state, ev.PaceNoted(rank=1, generation=state.generation, iteration=3, permille=2000))
    assert replica_forecast(slow, now) == {2: 500}
    assert no_forecast(state, now) == {2: 1000}
