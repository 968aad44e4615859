"""What holds for the state machine whatever comes in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step, step_all

MACHINES = st.sampled_from("ABCDE")
RANKS = st.integers(0, 2)
GENERATIONS = st.integers(0, 4)
ITERATIONS = st.integers(0, 5)
EVENTS = st.one_of(
    st.builds(ev.MachineJoined, machine=MACHINES),
    st.builds(ev.MachineLost, machine=MACHINES, reason=st.just("why")),
    st.builds(ev.SessionlessWorkers, machine=MACHINES, generation=GENERATIONS),
    st.builds(
        ev.StatusReported,
        rank=RANKS,
        generation=GENERATIONS,
        iteration=st.none() | ITERATIONS,
        live=st.booleans(),
        stages=RANKS.map(lambda r: (r,)),
    ),
    st.builds(ev.WorkerReady, rank=RANKS, generation=GENERATIONS),
    st.builds(ev.ReplayFailed, rank=RANKS, generation=GENERATIONS, reason=st.just("why")),
    st.builds(
        ev.CheckpointDamaged, rank=RANKS, generation=GENERATIONS, iteration=ITERATIONS, reason=st.just("why")
    ),
    st.builds(ev.CommunicationFailed, rank=RANKS, generation=GENERATIONS, reason=st.just("why")),
    st.builds(
        ev.PartPersisted,
        rank=RANKS,
        iteration=ITERATIONS,
        epoch=st.integers(0, 2),
        generation=GENERATIONS,
        path=st.just("path"),
    ),
    st.builds(ev.CheckpointCommitted, iteration=ITERATIONS, epoch=st.integers(0, 2), keep=st.integers(1, 3)),
    st.builds(ev.CheckpointRequested, rank=RANKS, iteration=ITERATIONS, generation=GENERATIONS),
    st.builds(ev.WorkerFinished, rank=RANKS, generation=GENERATIONS, saves=st.one_of(st.none(), ITERATIONS)),
    st.builds(ev.ScriptExited, machine=MACHINES, started_in=GENERATIONS),
    st.builds(ev.ScriptFailed, machine=MACHINES, started_in=GENERATIONS, reason=st.just("why")),
    st.builds(
        ev.DeadlinePassed,
        generation=GENERATIONS,
        phase=st.sampled_from(("agreeing", "recovering")),
        machines=st.tuples(MACHINES, MACHINES),
        reason=st.just("why"),
    ),
    st.builds(ev.FaultInjected, fault=st.just("fault")),
    st.builds(ev.JobClosed, reason=st.just("why")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_journal_leaves_a_sound_state(events: list[ev.Event]) -> None:
    state = State()
    for event in [
        ev.JobOpened(machines=3, restarts=1),
        *(ev.MachineJoined(machine=name) for name in "ABC"),
        *events,
    ]:
        before, state = state, step(state, event)
        members = [
            m for slot, m in enumerate(state.members) if m is not None and slot not in state.membership.exited
        ]
        places = [*members, *state.membership.spares]
        assert len(places) == len(set(places))
        assert state.phase == Phase.ENDED or not set(places) & set(state.membership.fenced)
        assert (state.checkpoints.committed or 0) >= (before.checkpoints.committed or 0)
        assert state.generation >= before.generation
        assert state.checkpoints.epoch >= before.checkpoints.epoch
        assert (state.plan is not None) == (state.phase in (Phase.RECOVERING, Phase.LIVE))
        assert state.checkpoints.requested is None or state.checkpoints.requested > (
            -1 if state.checkpoints.committed is None else state.checkpoints.committed
        )
        assert state.checkpoints.requested is None or state.generation == before.generation
        assert before.phase != Phase.ENDED or state is before


def runs_of(event: type[ev.Event], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[list[ev.Event]]:
    """Neighbouring events of one kind, most of them of one generation: what a relay passes on at once."""
    usual = st.one_of(st.just(1), st.just(1), st.just(2), GENERATIONS)
    return usual.flatmap(
        lambda generation: st.lists(
            st.builds(
                event,
                rank=RANKS,
                generation=st.one_of(st.just(generation), st.just(generation), GENERATIONS),
                **fields,
            ),
            min_size=2,
            max_size=8,
        )
    )


RUNS = st.one_of(
    runs_of(
        ev.StatusReported,
        iteration=st.none() | st.integers(3, 4),
        live=st.booleans(),
        stages=st.just(()),
        holds=st.just(("all",)),
    ),
    runs_of(ev.WorkerReady),
    runs_of(
        ev.PartPersisted, iteration=st.integers(3, 5), epoch=st.integers(0, 1), path=st.sampled_from("ab")
    ),
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(EVENTS.map(lambda event: [event]), RUNS, RUNS), max_size=12),
    st.lists(st.integers(1, 9)),
)
def test_events_that_are_applied_together_make_what_they_make_one_by_one(
    drawn: list[list[ev.Event]], sizes: list[int]
) -> None:
    events: list[ev.Event] = [
        ev.JobOpened(machines=3, restarts=1, checkpoint=3),
        *(ev.MachineJoined(machine=name) for name in "ABC"),
        *(event for run in drawn for event in run),
    ]
    one_by_one = together = State()
    for size in [*sizes, len(events)]:
        block, events = events[:size], events[size:]
        for event in block:
            one_by_one = step(one_by_one, event)
        together = step_all(together, block)
        assert together == one_by_one


JOINS = st.lists(
    st.builds(
        ev.MachineJoined,
        machine=st.sampled_from([f"{name}.{incarnation}" for name in "ABCDEF" for incarnation in range(2)]),
        preferred_slot=st.none() | st.integers(0, 3),
        address=st.sampled_from(["x:1", "y:1"]),
        setup=st.sampled_from([("torch: 2",), ("torch: 2",), ("torch: 3",)]),
        host=st.sampled_from(["", "", "A.0"]),
        identity=st.sampled_from(["", "one", "two", "three"]),
    ),
    min_size=1,
    max_size=8,
)
LOSSES = st.builds(
    ev.MachineLost,
    machine=st.sampled_from(["A.0", "B.0", "B.1", "C.0"]),
    reason=st.just("?"),
    reporter=st.sampled_from(["", "C.0"]),
    silent=st.booleans(),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(JOINS, LOSSES.map(lambda event: [event])), max_size=8))
def test_joins_that_are_applied_together_make_what_they_make_one_by_one(blocks: list[list[ev.Event]]) -> None:
    one_by_one = together = step(State(), ev.JobOpened(machines=4, setup=("torch: 2",)))
    for block in blocks:
        for event in block:
            one_by_one = step(one_by_one, event)
        together = step_all(together, block)
        assert together == one_by_one


def test_a_report_after_a_script_has_ended_ends_the_job_among_others_as_well_as_alone() -> None:
    opened: list[ev.Event] = [ev.JobOpened(machines=3), *(ev.MachineJoined(machine=name) for name in "ABC")]
    state = step_all(State(), [*opened, ev.ScriptExited(machine="A", started_in=1)])
    reports = [ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in (1, 2)]
    assert step_all(state, reports) == step(state, reports[0])
    assert step_all(state, reports).phase == Phase.ENDED


@pytest.mark.parametrize(
    ("saves", "committed", "fails"),
    [(8, 4, True), (8, 8, False), (8, None, True), (None, 4, False), (None, None, False)],
)
def test_a_run_fails_without_the_checkpoint_of_its_last_iteration(
    saves: int | None, committed: int | None, fails: bool
) -> None:
    """And one between two regular checkpoints does not: nobody was promised one of its last iteration."""
    opened: list[ev.Event] = [ev.JobOpened(machines=2), *(ev.MachineJoined(machine=name) for name in "AB")]
    reports = [ev.StatusReported(rank=rank, generation=1, iteration=None, steps=8) for rank in (0, 1)]
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in (0, 1)]
    finished = [
        ev.WorkerFinished(rank=0, generation=1, saves=saves),
        ev.WorkerFinished(rank=1, generation=1),  # it knew of a newer commit
    ]
    state = step_all(State(), [*opened, *reports, *ready, *finished])
    if committed is not None:
        epoch = state.checkpoints.epoch
        state = step(state, ev.CheckpointCommitted(iteration=committed, epoch=epoch, keep=2))
    exits = [ev.ScriptExited(machine=name, started_in=1, iteration=8) for name in "AB"]
    state = step_all(state, exits)
    assert state.phase == Phase.ENDED
    assert state.verdict is not None
    assert state.verdict.ok != fails
    if fails:
        assert "its last checkpoint, of iteration 8, is not in the store" in state.verdict.reason
        goes_on = {4: "--resume begins from the checkpoint at iteration 4, trains the last 4 of 8 iterations"}
        assert goes_on.get(committed or 0, "--fresh trains once more") in state.verdict.reason


def test_all_participants_apply_a_deadline_alike() -> None:
    """A set's order differs from process to process; names are chosen so that one order cannot be luck."""
    for i in range(20):
        names = [f"machine-{i}-{n}" for n in range(4)]
        state = State()
        events: list[ev.Event] = [
            ev.JobOpened(machines=4),
            *(ev.MachineJoined(machine=name) for name in [*names, "X", "Y", "Z"]),
        ]
        for event in events:
            state = step(state, event)
        state = step(
            state,
            ev.DeadlinePassed(
                generation=1, phase="agreeing", machines=(names[3], names[1], names[2]), reason="silent"
            ),
        )
        assert state.members == (names[0], "X", "Y", "Z")
