"""Changes to another world, event by event and in any order: what is in the state then."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, WorkerOrder, agent_order, worker_order
from swift_ft.recovery.protocol import step, step_all
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_from_text, snapshot_to_text
from swift_ft.recovery.worlds import Change, NextTodo, OfferedState, World, Worlds, next_todo, without_change

MACHINES = ("A", "B", "C", "D")


def live(machines: int = 2, spares: int = 1, workers: int = 1, min_machines: int | None = None) -> State:
    """A job that trains: on ``A``, ``B`` and so on, with the next ones as spares."""
    opened = ev.JobOpened(machines=machines, workers_per_machine=workers, min_machines=min_machines)
    names = MACHINES[: machines + spares]
    joins = [ev.MachineJoined(machine=name, address=f"{name}:1", domain=f"rack of {name}") for name in names]
    reports = [
        ev.StatusReported(rank=rank, generation=1, iteration=None, live=False, holds=("model",))
        for rank in range(machines * workers)
    ]
    return step_all(State(), [opened, *joins, *reports])


def switched(state: State, machines: tuple[str, ...], at: int = 7) -> State:
    """All that leads to the next world, without anything that goes wrong."""
    return step_all(state, a_change(state, machines, at))


def a_change(state: State, machines: tuple[str, ...], at: int = 7) -> list[ev.Event]:
    world, size = state.worlds.planned + 1, len(machines) * state.shape.workers_per_machine
    generation = state.generation
    return [
        ev.ChangePlanned(world=world, machines=machines, plan="a plan"),
        *(ev.NextPrepared(rank=rank, world=world) for rank in range(size)),
        ev.SwitchRequested(rank=0, generation=generation, iteration=at, world=world),
        *(an_offer(rank, generation, at) for rank in range(state.world_size)),
        *(ev.StateTaken(rank=rank, world=world) for rank in range(size)),
    ]


def an_offer(rank: int, generation: int, at: int) -> ev.StateOffered:
    return ev.StateOffered(rank=rank, generation=generation, iteration=at, address=f"h{rank}:1", digest="d")


# -------------------------------------------------------------------------------------------- one change


def test_what_the_next_world_is() -> None:
    planned = step(
        live(),
        ev.ChangePlanned(
            world=1, machines=("C", "A"), command=("train.py", "--wide"), plan="wide", reason="x"
        ),
    )
    change = planned.worlds.change
    assert change is not None
    assert change.world == World(1, ("C", "A"), ("train.py", "--wide"), plan="wide")
    assert change.started_in == planned.generation + 1
    assert (change.slot_of("A"), change.slot_of("C"), change.slot_of("B")) == (1, 0, None)
    assert planned.worlds.planned == 1


def test_a_world_keeps_the_machine_time_of_those_before() -> None:
    """Two machines for 10 iterations of 5 ns, three for 20 of 4 ns; then somebody else asks."""

    def asked(state: State, machines: tuple[str, ...], at: int, before_ns: int) -> State:
        planned, *rest = a_change(state, machines, at)
        assert isinstance(planned, ev.ChangePlanned)
        state = step_all(state, [dataclasses.replace(planned, before_ns=before_ns), *rest])
        size = len(machines)
        reports = [
            ev.StatusReported(rank=r, generation=state.generation, iteration=at, live=True, holds=("model",))
            for r in range(size)
        ]
        return step_all(state, reports)

    state = asked(live(2, 1), MACHINES[:3], 10, 5)
    assert state.worlds.present.spent_ns == 2 * 10 * 5
    assert state.worlds.present.spent_until(12, 3 * 4) == 100 + 2 * 12
    state = asked(state, MACHINES[:2], 30, 4)
    assert state.worlds.present.spent_ns == 100 + 3 * 20 * 4
    state = asked(state, MACHINES[:3], 40, 0)
    assert state.worlds.present.spent_ns == 0
    assert state.worlds.present.spent_until(42, 7) == 42 * 7


def test_what_a_plan_leaves_out_stays_as_it_was() -> None:
    wide = ev.ChangePlanned(world=1, machines=("A", "B"), command=("wide.py",), plan="wide")
    state = step(live(), wide)
    for event in a_change(live(), ("A", "B"))[1:]:
        state = step(state, event)
    assert state.worlds.present == World(1, ("A", "B"), ("wide.py",), plan="wide", since=7)
    again = step_all(
        state,
        [ev.StatusReported(rank=r, generation=2, iteration=7, live=True, holds=("model",)) for r in (0, 1)],
    )
    assert again.phase == Phase.LIVE
    planned = step(again, ev.ChangePlanned(world=2, machines=("B", "A"))).worlds.change
    assert planned is not None
    assert (planned.world.command, planned.world.plan) == (("wide.py",), "wide")
    fewer = step(again, ev.ChangePlanned(world=2, machines=("B",))).worlds.change
    assert fewer is not None
    assert (fewer.world.command, fewer.world.plan) == (("wide.py",), "")


def test_offers_are_where_the_next_world_finds_them() -> None:
    state = step_all(live(), a_change(live(), ("C", "B"))[:-2])
    change = state.worlds.change
    assert change is not None
    assert change.offered[1] == OfferedState(1, "h1:1", "B", "d")
    orders = [worker_order(state, machine="C", rank=r, started_in=2, world=1) for r in (0, 1)]
    assert orders == [WorkerOrder.TAKE] * 2


def test_a_switch_opens_one_generation_and_one_epoch() -> None:
    before = live()
    state = switched(before, ("C", "A"))
    assert (state.generation, state.phase) == (before.generation + 1, Phase.AGREEING)
    assert state.checkpoints.epoch == before.checkpoints.epoch + 1
    assert state.checkpoints.log_since == state.generation
    assert dict(state.checkpoints.log_gap_before) == {0: 7, 1: 7}
    assert state.layouts.pending is None
    assert state.layouts.since == 7
    assert state.worlds == Worlds(World(1, ("C", "A"), plan="a plan", since=7), planned=1)


def test_machines_keep_their_domains_and_the_last_ones_wait() -> None:
    state = switched(live(), ("C", "A"))
    assert state.members == ("C", "A")
    assert state.domains == ("rack of C", "rack of A")
    assert state.membership.waiting() == ["B"]
    assert state.membership.spares["B"].domain == "rack of B"
    assert {*state.membership.addresses} == {"A", "B", "C"}
    assert dict(state.membership.started_in) == {0: 2, 1: 2}
    assert state.membership.arrivals == 4


def test_who_waits_since_the_switch_comes_after_who_waited_before() -> None:
    state = switched(live(3, spares=1), ("A",))
    assert state.membership.waiting() == ["D", "B", "C"]


def test_a_smaller_world_may_always_run_on_its_own_machines() -> None:
    assert switched(live(3, min_machines=3), ("A", "B")).shape.min_machines == 2
    assert switched(live(2, min_machines=1), ("A", "B", "C")).shape.min_machines == 1
    assert switched(live(2), ("A", "B", "C")).shape.min_machines is None


def test_pace_is_forgotten_with_the_workers_that_had_it() -> None:
    slow = step(live(), ev.PaceNoted(rank=0, generation=1, iteration=5, permille=2000))
    assert slow.membership.pace
    assert not switched(slow, ("B", "A")).membership.pace


def test_a_machine_whose_slot_is_gone_ends_its_workers() -> None:
    state = switched(live(), ("A",))
    assert agent_order(state, machine="B", started_in=1).todo == AgentTodo.RETIRE
    assert agent_order(state, machine="B", started_in=None).todo == AgentTodo.WAIT
    assert agent_order(state, machine="A", started_in=1).todo == AgentTodo.LAUNCH  # unless it has adopted
    assert agent_order(state, machine="A", started_in=2).todo == AgentTodo.WAIT
    assert agent_order(live(), machine="C", started_in=None).todo == AgentTodo.WAIT


def test_orders_for_workers_of_the_next_world() -> None:
    worlds = Worlds(World(1), Change(World(2, ("A", "B")), started_in=4), planned=2)
    assert next_todo(worlds, "A", None) == NextTodo.START
    assert next_todo(worlds, "C", None) == NextTodo.NOTHING
    assert next_todo(worlds, "A", 2) == NextTodo.NOTHING
    assert next_todo(worlds, "A", 1) == NextTodo.ADOPT
    assert next_todo(without_change(worlds, "x"), "A", 2) == NextTodo.DROP
    assert next_todo(without_change(worlds, "x"), "A", None) == NextTodo.NOTHING


def test_a_change_that_is_none_is_not_given_up() -> None:
    worlds = Worlds(given_up="the last time")
    assert without_change(worlds, "again") is worlds
    state = live()
    assert step(state, ev.ChangeGivenUp(world=1, reason="x")) is state
    assert step(state, ev.StateTaken(rank=0, world=1)) is state
    assert step(state, ev.NextPrepared(rank=0, world=1)) is state


def test_workers_of_a_world_that_was_dropped_are_never_those_of_a_later_one() -> None:
    """All of them were started for the generation in which the later one began."""
    dropped = step_all(
        live(), [ev.ChangePlanned(world=1, machines=("A", "B")), ev.ChangeGivenUp(world=1, reason="slow")]
    )
    state = switched(dropped, ("A", "B"))
    assert worker_order(state, machine="A", rank=0, started_in=2, world=1) == WorkerOrder.DIE
    assert worker_order(state, machine="A", rank=0, started_in=2, world=2) == WorkerOrder.REPORT
    ended = step(state, ev.JobClosed(reason="x"))
    assert worker_order(ended, machine="A", rank=0, started_in=2, world=1) == WorkerOrder.DIE
    assert worker_order(ended, machine="A", rank=0, started_in=2, world=2) == WorkerOrder.STOP
    assert worker_order(ended, machine="A", rank=0, started_in=2, world=3) == WorkerOrder.STOP


# ------------------------------------------------------------------------------------------- in any order

worlds = st.integers(1, 4)
ranks = st.integers(0, 4)
generations = st.integers(1, 4)
iterations = st.sampled_from((7, 9))
names = st.sampled_from((*MACHINES, "E"))

EVENTS = st.one_of(
    st.builds(ev.ChangePlanned, world=worlds, machines=st.lists(names, max_size=4, unique=True).map(tuple)),
    st.builds(ev.NextPrepared, rank=ranks, world=worlds),
    st.builds(
        ev.SwitchRequested, rank=st.integers(0, 1), generation=generations, iteration=iterations, world=worlds
    ),
    st.builds(an_offer, st.integers(0, 1), generations, iterations),
    st.builds(ev.StateTaken, rank=ranks, world=worlds),
    st.builds(ev.ChangeGivenUp, world=worlds, reason=st.just("slow")),
    st.builds(ev.MachineLost, machine=names, reason=st.just("was killed"), on_request=st.booleans()),
    st.builds(ev.MachineJoined, machine=names, setup=st.sampled_from(((), ("torch: 1",)))),
    st.builds(ev.DrainRequested, machine=names, asked_by=st.just("somebody")),
    st.builds(
        ev.PartPersisted,
        rank=ranks,
        iteration=iterations,
        epoch=generations,
        generation=generations,
        path=st.just("p"),
    ),
    st.builds(ev.CheckpointCommitted, iteration=iterations, epoch=generations, keep=st.just(1)),
    st.builds(ev.CommunicationFailed, rank=st.integers(0, 1), generation=generations, reason=st.just("x")),
    st.builds(
        ev.StatusReported,
        rank=ranks,
        generation=generations,
        iteration=iterations,
        live=st.just(True),
        holds=st.just(("model",)),
    ),
    st.builds(ev.WorkerReady, rank=ranks, generation=generations),
    st.builds(ev.JobClosed, reason=st.just("Ctrl-C")),
)
CHANGES = st.permutations(a_change(live(), ("C", "A")))
"""All that leads to the next world, in any order."""
STORIES = st.one_of(
    st.lists(EVENTS, max_size=40),
    st.tuples(st.integers(0, 9), st.lists(EVENTS, max_size=25)).map(
        lambda story: a_change(live(), ("C", "A"))[: story[0]] + story[1]
    ),
    CHANGES,
)


def told(events: list[ev.Event]) -> tuple[list[ev.Event], list[State]]:
    """The events, with the states before and after them. No worker of the present world is beyond it."""
    states, found = [live()], list[ev.Event]()
    for event in events:
        state = states[-1]
        now = getattr(event, "epoch", state.checkpoints.epoch) == state.checkpoints.epoch
        if isinstance(event, ev.PartPersisted | ev.StatusReported | ev.WorkerReady) and now:
            event = dataclasses.replace(event, rank=event.rank % state.world_size)
        found.append(event)
        states.append(step(state, event))
    return found, states


@settings(max_examples=150, deadline=None)
@given(STORIES)
def test_whatever_comes_a_machine_is_in_one_place_and_the_state_has_a_text(events: list[ev.Event]) -> None:
    found, states = told(events)
    for event, before, state in zip(found, states, states[1:], strict=False):
        check_places(state)
        check_worlds(before, state, event)
    for state in states[-2:]:
        made = JournalSnapshot(state, Sequencer(), 0)
        assert snapshot_from_text(snapshot_to_text(made)) == made
    assert step_all(live(), found) == states[-1]


def check_places(state: State) -> None:
    """A member, a spare, fenced or refused: one of these."""
    membership = state.membership
    places = (membership.slots, membership.spares, membership.fenced, membership.refused)
    known = [machine for place in places for machine in place]
    assert len(known) == len({*known})
    assert {machine: slot for slot, machine in membership.members.items()} == dict(membership.slots)
    assert all(slot < state.shape.machines for slot in membership.members)
    assert {*membership.started_in} == {*range(state.shape.machines)}
    assert all(started_in <= state.generation for started_in in membership.started_in.values())


def check_worlds(before: State, state: State, event: ev.Event) -> None:
    worlds, change = state.worlds, state.worlds.change
    assert worlds.present.number <= worlds.planned <= before.worlds.planned + 1
    pending = state.layouts.pending
    if change is not None:
        assert state.phase in (Phase.LIVE, Phase.ENDED)
        assert change.started_in == state.generation + 1
        assert change.world.number == worlds.planned > worlds.present.number
        if state.phase == Phase.LIVE:
            assert all(
                m in state.membership.slots or m in state.membership.spares for m in change.world.machines
            )
        assert not change.offered or pending is not None
        assert not change.taken or len(change.offered) == state.world_size
    if pending is not None and pending.world and state.phase == Phase.LIVE:
        assert change is not None
        assert change.world.number == pending.world
    if worlds.present != before.worlds.present:
        assert isinstance(event, ev.StateTaken)
        assert state.generation == before.generation + 1
        assert state.checkpoints.epoch == before.checkpoints.epoch + 1
        assert state.checkpoints.committed == before.checkpoints.committed
        assert state.members == worlds.present.machines


@settings(max_examples=100, deadline=None)
@given(STORIES)
def test_no_worker_of_two_worlds_acts_at_once(events: list[ev.Event]) -> None:
    state = told(events)[1][-1]
    acting = [
        (rank, world)
        for rank in range(state.world_size)
        for world in range(5)
        for started_in in range(state.generation + 1)
        if (machine := state.membership.members.get(rank)) is not None
        and worker_order(state, machine=machine, rank=rank, started_in=started_in, world=world)
        in (WorkerOrder.REPORT, WorkerOrder.EXECUTE, WorkerOrder.RUN)
    ]
    assert len(acting) == len({rank for rank, _ in acting})
