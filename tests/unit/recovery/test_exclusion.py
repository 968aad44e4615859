"""Machines that were lost too often by their own fault are left out, and failure domains with them."""

from __future__ import annotations

from functools import reduce

import pytest

from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import News
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import ADVICE, Cause
from swift_ft.recovery.entries import Entry, event_from_dict, event_to_dict
from swift_ft.recovery.exclusion import domains_left_out, machines_left_out
from swift_ft.recovery.history import History
from swift_ft.recovery.incidents import Incident
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, agent_order
from swift_ft.recovery.pauses import pauses_of
from swift_ft.recovery.protocol import step, step_all
from tests.unit.recovery.test_recoveries import report

LIMIT = 3
OPENED = ev.JobOpened(machines=2, max_machine_failures=LIMIT)


def joined(name: str, domain: str = "", identity: str = "") -> ev.MachineJoined:
    return ev.MachineJoined(machine=name, domain=domain, identity=identity)


def lost(name: str, **facts: object) -> ev.MachineLost:
    return ev.MachineLost(machine=name, reason="gone", **facts)  # type: ignore[arg-type]


def spare_lost(name: str, times: int, domain: str = "", first: int = 0) -> list[ev.Event]:
    """A spare that is lost so often."""
    names = [f"{name}.{number}" for number in range(first, first + times)]
    return [event for one in names for event in (joined(one, domain), lost(one))]


def after(*events: ev.Event, opened: ev.JobOpened = OPENED) -> State:
    return reduce(step, [opened, joined("a.0"), joined("b.0"), *events], State())


def told(*events: ev.Event) -> tuple[list[News], list[Incident]]:
    history, news = History(), []
    for event in (OPENED, joined("a.0"), joined("b.0"), *events):
        news += news_of(history.apply(Entry(0, event, 0.0, "test")), history)
    return news, history.incidents


def test_the_nth_loss_leaves_a_machine_out() -> None:
    state = after(*spare_lost("m", LIMIT - 1))
    assert not machines_left_out(state)
    assert "m.2" in step(state, joined("m.2")).membership.spares
    state = step(after(*spare_lost("m", LIMIT)), joined("m.3"))
    assert machines_left_out(state) == {"m"}
    assert "m.3" not in state.membership.spares
    order = agent_order(state, machine="m.3", started_in=None)
    assert order.todo == AgentTodo.REFUSED
    assert order.reason.startswith("machine m is left out: it was lost 3 times in this run by its own fault")
    assert "start its launcher again" in order.reason, "nothing tells this machine from a new one"


def test_another_launcher_on_the_same_machine_is_refused_too() -> None:
    losses: list[ev.Event] = []
    for name in ("m.0", "n.0", "o.0"):
        losses += [joined(name, identity="host7/0"), lost(name)]
    state = step(after(*losses), joined("p.0", identity="host7/0"))
    reason = state.membership.refused["p.0"]
    assert "machine host7/0 is left out" in reason
    assert "another NODE_NAME" in reason
    assert "q.0" in step(state, joined("q.0", identity="host7-repaired/0")).membership.spares


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_old_journals_leave_nobody_out(limit: int | None) -> None:
    data = event_to_dict(ev.JobOpened(machines=2, max_machine_failures=limit))
    if limit is None:
        data.pop("max_machine_failures", None)
    opened = event_from_dict(data)
    assert isinstance(opened, ev.JobOpened)
    state = after(*spare_lost("m", 9), opened=opened)
    assert bool(machines_left_out(state)) == (limit is not None)


@pytest.mark.parametrize(
    "facts",
    [
        *({"cause": cause} for cause in (Cause.SCRIPT, Cause.NETWORK, Cause.SIGNAL, Cause.INJECTED)),
        {"stopped_by": 15},
        {"on_request": True},
        {"starts_again": True},
    ],
)
def test_the_fault_of_others_does_not_count(facts: dict[str, object]) -> None:
    losses: list[ev.Event] = []
    for number in range(LIMIT):
        losses += [joined(f"m.{number}"), lost(f"m.{number}", **facts)]
    assert not machines_left_out(after(*losses))


def test_a_machine_that_is_left_out_is_not_waited_for() -> None:
    """Others have lost sight of it, so that it would stay away for a while."""
    events: list[ev.Event] = [lost("b.0")]
    for number in range(LIMIT):
        events += [joined(f"m.{number}"), lost(f"m.{number}", reporter="a.0")]
        if number == LIMIT - 2:
            assert pauses_of(after(*events))
    state = after(*events)
    assert state.phase == Phase.FORMING
    assert not pauses_of(state)
    assert agent_order(state, machine=f"m.{LIMIT - 1}", started_in=None).wait_s == 0, "it is told at once"


def test_a_domain_is_left_out_where_most_losses_are_of_several() -> None:
    both = [*spare_lost("m", 3, "rack"), *spare_lost("n", 2, "rack")]
    assert not domains_left_out(after(*both)), "most are of m"
    assert domains_left_out(after(*both, *spare_lost("n", 1, "rack", first=2))) == {"rack"}
    assert domains_left_out(after(*both, *spare_lost("o", 2, "rack"))) == {"rack"}
    # A single loss is chance, however many machines have one.
    chance = [event for one in "opqrst" for event in spare_lost(one, 1, "rack")]
    assert not domains_left_out(after(*spare_lost("m", 3, "rack"), *chance))


def test_joins_of_one_block_are_refused_as_well() -> None:
    """Many joins are noted together where nothing speaks against that."""
    state = after(
        *spare_lost("m", 3, "rack"),
        *spare_lost("n", 3, "rack"),
        *(lost(name, on_request=True) for name in ("a.0", "b.0")),
        joined("x.0"),
        opened=ev.JobOpened(machines=9, max_machine_failures=LIMIT),
    )
    block = [joined("p.0", "rack"), joined("q.0", "row"), joined("m.3")]
    together = step_all(state, block)
    assert together == reduce(step, block, state)
    assert {*together.membership.refused} == {"p.0", "m.3"}


def test_the_console_and_the_incident_say_so() -> None:
    news, incidents = told(
        *(report(rank, 1, None) for rank in range(2)),
        ev.CheckpointCommitted(iteration=5, epoch=1),
        *spare_lost("b", LIMIT - 1, first=1),
        *(lost("b.0"), joined("c.0"), report(0, 2, 7), report(1, 2, None)),
        ev.WorkerReady(rank=1, generation=2),
    )
    (line,) = [one for one in news if one.event == "machine_left_out"]
    assert "machine b is left out: it was lost 3 times" in line.text
    (incident,) = incidents
    assert incident.machines == ("b.0",)
    assert incident.advice.startswith(f"{ADVICE[Cause.MACHINE]}; machine b is left out")


def test_the_console_says_when_a_domain_is_left_out() -> None:
    news, _ = told(*spare_lost("m", 3, "rack"), *spare_lost("n", 3, "rack"))
    lines = [one.text for one in news if one.event == "machine_left_out"]
    assert len(lines) == 3
    assert "all machines of failure domain rack are left out while others take part: 2 of them" in lines[-1]
