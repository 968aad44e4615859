"""The policy of changes: which it proposes, when, and that it loses little to machines that come and go."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery import events as ev
from swift_ft.recovery.layout.change import Change
from swift_ft.recovery.policy import (
    Facts,
    Kind,
    Limits,
    Member,
    Past,
    Price,
    Proposal,
    Stay,
    Waiting,
    decide,
    members_of,
    spares_of,
)
from swift_ft.recovery.protocol import step
from tests.support.journals import machine
from tests.unit.recovery.test_next_world import live, names, with_guest

MS = 1_000_000
FORECAST = ((1, 200 * MS), (2, 100 * MS), (3, 70 * MS), (4, 55 * MS))
JOB = Facts(
    iteration=100,
    left=None,
    members=(Member("a"), Member("b")),
    spares=(),
    now_ns=100 * MS,
    forecast=FORECAST,
    cost_ns=900 * MS,
)


def proposed(facts: Facts) -> Proposal:
    found = decide(facts)
    assert isinstance(found, Proposal), found
    return found


def stays(facts: Facts) -> str:
    found = decide(facts)
    assert isinstance(found, Stay), found
    return found.reason


def test_a_job_without_others_stays() -> None:
    assert stays(JOB) == "no other machines can train, or none that the limits allow"


def test_it_grows_once_a_spare_has_waited_for_what_the_change_costs() -> None:
    """30 ms of each iteration are lost by waiting: 900 ms in 30 iterations."""
    facts = replace(JOB, spares=(Waiting("c", 71),))
    assert stays(facts) == (
        "an iteration on 3 machines takes 70 ms, not 100: it pays after 30 iterations, possible for 29"
    )
    found = proposed(replace(facts, iteration=101))
    assert (found.kind, found.machines) == (Kind.GROW, ("a", "b", "c"))
    assert found.forecast == Change(100 * MS, 70 * MS, 900 * MS)
    assert found.reason == "machines wait: an iteration on 3 machines takes 70 ms, not 100"


def test_all_that_wait_join_at_once_if_that_is_fastest() -> None:
    facts = replace(JOB, spares=(Waiting("c", 0), Waiting("d", 1)))
    assert proposed(facts).machines == ("a", "b", "c", "d")
    assert proposed(replace(facts, limits=Limits(1, 3))).machines == ("a", "b", "c")
    assert "limits" in stays(replace(facts, limits=Limits(1, 2)))


def test_no_change_that_cannot_pay_before_the_end() -> None:
    facts = replace(JOB, spares=(Waiting("c", 0),), left=30)
    assert stays(facts).endswith("it pays after 30 iterations, and 30 are left")
    assert proposed(replace(facts, left=31)).kind == Kind.GROW


def test_no_change_for_a_gain_that_may_be_noise() -> None:
    facts = replace(JOB, spares=(Waiting("c", 0),), forecast=((2, 100 * MS), (3, 96 * MS)))
    assert stays(facts).endswith("too little gain")
    assert proposed(replace(facts, forecast=((3, 95 * MS),), iteration=180)).kind == Kind.GROW


def test_no_number_of_machines_that_has_no_forecast() -> None:
    assert "no other machines" in stays(replace(JOB, spares=(Waiting("c", 0),), forecast=((4, 1),)))


def test_a_slow_machine_is_replaced() -> None:
    slow = replace(JOB, members=(Member("a", pace=2000), Member("b")), now_ns=200 * MS)
    assert "no other machines" in stays(slow)
    found = proposed(replace(slow, spares=(Waiting("c", 0),)))
    assert (found.kind, found.machines) == (Kind.REPLACE, ("c", "b"))
    assert found.forecast.after_ns == 100 * MS


def test_a_world_in_which_a_slow_machine_stays_is_as_slow() -> None:
    """With two spares it is replaced, and one more joins."""
    slow = replace(JOB, members=(Member("a", pace=2000), Member("b")), now_ns=200 * MS)
    found = proposed(replace(slow, spares=(Waiting("c", 0), Waiting("d", 0))))
    assert (found.kind, found.machines) == (Kind.GROW, ("b", "c", "d")) or found.machines == ("c", "b")
    assert found.forecast.after_ns <= 100 * MS


HOUR_MS = 3600 * 1000
DEAR = replace(JOB, spares=(Waiting("c", 0),), left=1000, spent_ns=20_000 * MS)
"""20 s for the past, 3 times 0.9 s for the change to three machines, and 3 times 70 ms 1000 times."""
IN_ALL = 232_700


def most(price: float) -> Limits:
    """A machine costs 1 for each millisecond."""
    return Limits(price=Price(HOUR_MS, price))


LOST = replace(JOB, spares=(Waiting("c", 100),), grown=("a", "c", "b"), left=50)
"""A third machine was lost, and one comes."""


def test_a_machine_that_comes_for_a_lost_one_is_taken_at_once() -> None:
    found = proposed(LOST)
    assert (found.kind, found.machines) == (Kind.RETURN, ("a", "c", "b"))
    assert found.forecast == Change(100 * MS, 70 * MS, 900 * MS)
    assert found.reason == "machines have come for lost ones: 3 train then"
    # Without a forecast an iteration counts as long as now.
    assert proposed(replace(LOST, forecast=())).forecast == Change(100 * MS, 100 * MS, 900 * MS)


def test_losses_are_made_good_without_a_policy_and_nothing_else_is() -> None:
    alone = Limits(only_returns=True)
    assert proposed(replace(LOST, limits=alone)).kind == Kind.RETURN
    waits = replace(JOB, iteration=500, spares=(Waiting("c", 0),), limits=alone)
    assert stays(waits) == "no machine waits that a loss has left room for"
    assert proposed(replace(waits, limits=Limits())).kind == Kind.GROW
    leaves = replace(waits, members=(Member("a", leaving=True), Member("b")))
    assert "no machine waits" in stays(leaves)
    assert proposed(replace(leaves, limits=Limits())).kind == Kind.LEAVE


def test_no_loss_is_made_good_at_the_end_or_right_after_a_try() -> None:
    assert "9 are left" in stays(replace(LOST, left=9))
    assert proposed(replace(LOST, left=10)).kind == Kind.RETURN
    assert "was given up" in stays(replace(LOST, past=Past(1, 0, given_up=93)))
    assert proposed(replace(LOST, past=Past(1, 0, given_up=92))).kind == Kind.RETURN


def test_losses_are_made_good_within_the_limits() -> None:
    assert "limits allow" in stays(replace(LOST, limits=Limits(1, 2)))
    # Three machines for 0.9 s and for 50 iterations that take as long as now.
    unknown = replace(LOST, forecast=())
    assert proposed(replace(unknown, limits=most(17_700))).price == 17_700
    dear = decide(replace(unknown, limits=most(17_699)))
    assert isinstance(dear, Stay)
    assert dear.too_dear


def test_no_more_is_spent_than_training_may_cost() -> None:
    found = proposed(replace(DEAR, limits=most(IN_ALL)))
    assert (found.kind, found.price) == (Kind.GROW, IN_ALL)
    assert found.reason == (
        "machines wait: an iteration on 3 machines takes 70 ms, not 100; "
        "training costs 232700 in all then, and may cost 232700"
    )
    assert decide(replace(DEAR, limits=most(IN_ALL - 1))) == Stay(
        "an iteration on 3 machines takes 70 ms, not 100; "
        "training costs 232700 in all then, and may cost 232699",
        too_dear=True,
    )


def test_of_all_that_are_affordable_the_fastest_is_chosen() -> None:
    """Four machines would be faster still."""
    both = replace(DEAR, spares=(Waiting("c", 0), Waiting("d", 0)))
    assert len(proposed(replace(both, limits=most(10 * IN_ALL))).machines) == 4
    assert len(proposed(replace(both, limits=most(IN_ALL))).machines) == 3


def test_what_is_no_dearer_than_now_is_chosen_at_any_price() -> None:
    """Three machines at 66 ms cost less than two at 100; so does another one in the place of a slow one."""
    fast = replace(DEAR, forecast=((2, 100 * MS), (3, 66 * MS)), limits=most(1))
    assert proposed(fast).kind == Kind.GROW
    slow = replace(fast, members=(Member("a", pace=2000), Member("b")), now_ns=200 * MS, forecast=FORECAST)
    assert proposed(replace(slow, forecast=((2, 100 * MS),))).kind == Kind.REPLACE


def test_of_a_training_that_ends_nobody_knows_when_no_iteration_becomes_dearer() -> None:
    endless = replace(DEAR, left=None, limits=most(10 * IN_ALL))
    assert "nobody knows how long" in stays(endless)
    cheaper = proposed(replace(endless, forecast=((2, 100 * MS), (3, 66 * MS))))
    assert cheaper.price is None


def test_a_machine_that_leaves_is_replaced_at_any_price() -> None:
    members = (Member("a", leaving=True), Member("b"))
    assert proposed(replace(DEAR, members=members, limits=most(1))).kind == Kind.LEAVE


def test_a_guest_costs_nothing() -> None:
    """Two machines at 140 ms: three at 93 ms cost less, three at 94 ms more."""
    members = (Member("a"), Member("g", guest=True), Member("b"))
    facts = replace(DEAR, members=members, now_ns=140 * MS, limits=most(1))
    assert proposed(replace(facts, forecast=((3, 93 * MS),))).machines == ("a", "c", "b")
    assert "may cost" in stays(replace(facts, forecast=((3, 94 * MS),)))


def test_fewer_machines_instead_of_guests() -> None:
    members = (Member("a"), Member("g", guest=True), Member("b"))
    facts = replace(JOB, members=members, now_ns=140 * MS)
    found = proposed(facts)
    assert (found.kind, found.machines) == (Kind.SHRINK, ("a", "b"))
    assert "limits" in stays(replace(facts, limits=Limits(3)))


def test_who_was_asked_to_leave_is_moved_away_from_at_once() -> None:
    facts = replace(JOB, members=(Member("a", leaving=True), Member("b")), forecast=())
    assert "no other waits" in stays(facts)
    found = proposed(replace(facts, spares=(Waiting("c", 100),), past=Past(planned=3, since=99)))
    assert (found.kind, found.machines) == (Kind.LEAVE, ("c", "b"))
    assert found.forecast.gain_ns == 0
    assert "ends soon" in stays(replace(facts, spares=(Waiting("c", 100),), left=9))


def test_each_change_doubles_the_rest_after_it() -> None:
    facts = replace(JOB, spares=(Waiting("c", 0),), iteration=1000)
    for planned, rest in ((1, 8), (2, 16), (3, 32), (20, 512)):
        past = Past(planned=planned, since=1000 - rest + 1)
        assert "all changed" in stays(replace(facts, past=past))
        cheap = replace(facts, cost_ns=1, past=replace(past, since=1000 - rest))
        assert proposed(cheap).kind == Kind.GROW


def test_what_was_given_up_is_not_proposed_again_at_once() -> None:
    leaving = replace(JOB, members=(Member("a", leaving=True), Member("b")), spares=(Waiting("c", 0),))
    for facts in (leaving, replace(JOB, spares=(Waiting("c", 0),))):
        past = Past(planned=2, given_up=90)
        assert "given up" in stays(replace(facts, past=past))
        assert proposed(replace(facts, past=past, iteration=106))


members = st.lists(
    st.builds(
        Member,
        st.just(""),
        guest=st.booleans(),
        leaving=st.booleans(),
        pace=st.sampled_from([900, 1000, 1500, 3000]),
    ),
    min_size=1,
    max_size=5,
).map(lambda found: tuple(replace(one, machine=f"m{i}") for i, one in enumerate(found)))
spares = st.lists(st.integers(0, 200), max_size=4).map(
    lambda since: tuple(Waiting(f"s{i}", at) for i, at in enumerate(sorted(since)))
)
jobs = st.builds(
    Facts,
    iteration=st.integers(0, 200),
    left=st.none() | st.integers(0, 1000),
    members=members,
    spares=spares,
    now_ns=st.integers(1, 1000),
    forecast=st.dictionaries(st.integers(1, 9), st.integers(1, 1000)).map(lambda found: (*found.items(),)),
    cost_ns=st.integers(0, 5000),
    past=st.builds(Past, st.integers(0, 4), st.integers(0, 200), st.none() | st.integers(0, 200)),
    limits=st.builds(
        Limits,
        st.integers(1, 4),
        st.none() | st.integers(4, 8),
        st.none() | st.builds(Price, st.just(3.6e12), st.floats(1, 1e6)),
    ),
    spent_ns=st.integers(0, 10_000),
)


@given(jobs)
def test_nothing_is_proposed_that_cannot_be(facts: Facts) -> None:
    found = decide(facts)
    if isinstance(found, Stay):
        assert found.reason
        return
    by_name = {member.machine: member for member in facts.members}
    there = {*by_name, *(spare.machine for spare in facts.spares)}
    assert {*found.machines} <= there
    assert len({*found.machines}) == len(found.machines) > 0
    assert found.machines != tuple(by_name)
    assert not any(by_name[name].guest or by_name[name].leaving for name in found.machines if name in by_name)
    if found.kind == Kind.LEAVE:
        assert len(found.machines) == len(facts.members)
        return
    assert facts.limits.least <= len(found.machines) <= (facts.limits.most or 99)
    assert len(found.machines) in dict(facts.forecast)
    assert found.forecast.gain_ns > 0
    if facts.left is not None:
        assert found.forecast.gain_ns * facts.left > facts.cost_ns
    if facts.limits.price is not None:
        no_dearer = found.forecast.after_ns * len(found.machines) <= facts.now_machine_ns
        assert no_dearer or (found.price or math.inf) <= facts.limits.price.most


@given(st.integers(1, 29), st.integers(1, 60))
def test_machines_that_come_and_go_sooner_than_it_pays_change_nothing(stay: int, away: int) -> None:
    for iteration in range(300):
        came = iteration - iteration % (stay + away)
        here = (Waiting(f"c{came}", came),) if iteration - came < stay else ()
        stays(replace(JOB, iteration=iteration, spares=here))


@given(st.integers(0, 200))
def test_machines_that_come_and_go_lose_at_most_twice_what_knowing_would(stay: int) -> None:
    """A machine that stays for some iterations: what was lost by waiting, and by the change, in the end."""
    lost = 0
    for iteration in range(stay):
        if isinstance(decide(replace(JOB, iteration=iteration, spares=(Waiting("c", 0),))), Proposal):
            lost += JOB.cost_ns
            break
        lost += 30 * MS
    assert lost <= 2 * min(JOB.cost_ns, stay * 30 * MS)


def test_the_machines_of_a_state() -> None:
    state = live(2, 2)
    state = step(state, ev.DrainRequested(machine=machine(1)))
    state = step(state, ev.DrainRequested(machine=machine(2)))
    state = step(state, ev.PaceNoted(rank=0, generation=state.generation, iteration=3, permille=1700))
    assert members_of(state) == (Member(machine(0), pace=1700), Member(machine(1), leaving=True))
    assert spares_of(state) == names(3)


def test_a_guest_in_a_state() -> None:
    found = members_of(with_guest())
    assert [member.guest for member in found] == [False, True, False]


@pytest.mark.parametrize("count", [1, 5])
def test_the_least_and_the_most_are_kept(count: int) -> None:
    facts = replace(JOB, spares=tuple(Waiting(f"s{n}", 0) for n in range(count)), limits=Limits(3, 3))
    assert len(proposed(facts).machines) == 3
