"""Machines that were lost too often by their own fault are left out, and failure domains with them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import reduce

import pytest
from immutables import Map

from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import News
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import ADVICE, Cause
from swift_ft.recovery.entries import Entry, event_from_dict, event_to_dict
from swift_ft.recovery.exclusion import domains_left_out, is_deserted, machines_left_out
from swift_ft.recovery.history import History
from swift_ft.recovery.incidents import Incident
from swift_ft.recovery.job_state import JobShape, Phase, State
from swift_ft.recovery.membership import COMMITS_FOR_A_LOSS, Losses, Membership, Spare
from swift_ft.recovery.orders import AgentTodo, agent_order
from swift_ft.recovery.pauses import pauses_of
from swift_ft.recovery.protocol import step, step_all
from swift_ft.recovery.values import replace
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


def test_a_machine_that_works_for_long_has_its_losses_forgotten() -> None:
    """One for each hundred checkpoints in which it takes part. Who is lost more often is left out."""
    lose: list[ev.Event] = [lost("b.0"), joined("b.1")]
    state = after(*lose, *commits(COMMITS_FOR_A_LOSS - 1))
    assert state.membership.losses["b"].count == 1
    state = step(state, ev.CheckpointCommitted(iteration=COMMITS_FOR_A_LOSS, epoch=0))
    assert not state.membership.losses
    often = [event for k in range(2 * LIMIT) for event in losses_and_commits("b", k, COMMITS_FOR_A_LOSS // 2)]
    assert machines_left_out(after(*often)) == {"b"}
    seldom = [event for k in range(9 * LIMIT) for event in losses_and_commits("b", k, COMMITS_FOR_A_LOSS)]
    assert not machines_left_out(after(*seldom))


def test_who_takes_no_part_proves_nothing() -> None:
    state = after(*spare_lost("m", LIMIT - 1), joined("m.2"), *commits(9 * COMMITS_FOR_A_LOSS))
    assert state.membership.losses["m"].count == LIMIT - 1
    assert machines_left_out(step(state, lost("m.2"))) == {"m"}


def commits(count: int, after_it: int = 0) -> list[ev.Event]:
    return [ev.CheckpointCommitted(iteration=after_it + one, epoch=0) for one in range(1, count + 1)]


def losses_and_commits(name: str, number: int, count: int) -> list[ev.Event]:
    """A member is lost and comes back, and then checkpoints are committed."""
    lose: list[ev.Event] = [lost(f"{name}.{number}"), joined(f"{name}.{number + 1}")]
    return [*lose, *commits(count, number * count)]


def domains_of_racks(racks: int, machines: int, count_of: Callable[[int], int]) -> frozenset[str]:
    """The racks that are left out once their machines, which all take part, were lost so often.

    Args:
        count_of: by rack, how often its next machine was lost.
    """
    losses = {
        f"m-{rack}-{one}": Losses(count, f"rack {rack}")
        for rack in range(racks)
        for one in range(machines)
        if (count := count_of(rack))
    }
    names = {f"m-{rack}-{one}": f"rack {rack}" for rack in range(racks) for one in range(machines)}
    spares = {f"{name}.0": Spare(number, None, domain) for number, (name, domain) in enumerate(names.items())}
    shape = JobShape(machines=racks * machines, max_machine_failures=5)
    return domains_left_out(State(shape=shape, membership=Membership(spares=Map(spares), losses=Map(losses))))


def poisson(mean: float, chance: random.Random) -> int:
    count, product = 0, chance.random()
    while product > math.exp(-mean):
        count, product = count + 1, product * chance.random()
    return count


@pytest.mark.parametrize("mean", [0.5, 1.5])
@pytest.mark.parametrize("racks", [2, 8])
@pytest.mark.parametrize("machines", [16, 32])
def test_racks_that_are_lost_by_chance_stay(machines: int, racks: int, mean: float) -> None:
    """Machines of all racks are lost equally often. Less than one in a hundred of these jobs loses a rack."""
    chance = random.Random(f"{machines} {racks} {mean}")
    jobs = [domains_of_racks(racks, machines, lambda _: poisson(mean, chance)) for _ in range(300)]
    assert sum(map(bool, jobs)) < 3


@pytest.mark.parametrize(("machines", "least"), [(4, 70), (16, 95), (32, 95)])
def test_a_rack_that_fails_is_left_out(machines: int, least: int) -> None:
    """Each machine of one rack is lost four times on average, those of the others every fourth one."""
    chance = random.Random(machines)
    jobs = [
        domains_of_racks(4, machines, lambda rack: min(5, poisson(0.25 if rack else 4.0, chance)))
        for _ in range(100)
    ]
    assert sum(left_out == {"rack 0"} for left_out in jobs) >= least
    assert all(left_out <= {"rack 0"} for left_out in jobs)


ALL_LEFT_OUT: list[ev.Event] = []
for _name in "ab":
    for _number in range(LIMIT):
        ALL_LEFT_OUT += [lost(f"{_name}.{_number}"), joined(f"{_name}.{_number + 1}")]


def test_a_run_of_which_all_machines_are_left_out_is_deserted() -> None:
    before, state = after(*ALL_LEFT_OUT[:-1]), after(*ALL_LEFT_OUT)
    assert {*state.membership.refused} == {"a.3", "b.3"}
    assert is_deserted(before), "the last one is only told so"
    assert is_deserted(state)
    # Who was lost may come back, and whoever was asked for may come.
    others: list[ev.Event] = [joined("c.0"), lost("c.0")]
    assert not is_deserted(after(*others, *ALL_LEFT_OUT))
    assert not is_deserted(after(*others, lost("a.0"), lost("b.0")))
    requested = replace(state.membership, requested=Map({0: "a.2"}))
    assert not is_deserted(replace(state, membership=requested))
    assert not is_deserted(step(state, joined("c.0")))
    assert not is_deserted(State())
    differs = ev.MachineJoined(machine="x.0", setup=("torch: 1",))
    assert not is_deserted(step(step(State(), OPENED), differs)), "the first machines are about to join"


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
