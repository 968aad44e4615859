"""What holds for the state machine whatever comes in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import SwiftError
from swift_ft.recovery import events as ev
from swift_ft.recovery.events import event_from_dict, event_to_dict
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step

MACHINES = st.sampled_from("ABCDE")
RANKS = st.integers(0, 2)
GENERATIONS = st.integers(0, 4)
ITERATIONS = st.integers(0, 5)
EVENTS = st.one_of(
    st.builds(ev.Joined, MACHINES),
    st.builds(ev.Lost, MACHINES, st.just("why")),
    st.builds(ev.Bare, MACHINES, GENERATIONS),
    st.builds(
        ev.Reported, RANKS, GENERATIONS, st.none() | ITERATIONS, st.booleans(), RANKS.map(lambda r: (r,))
    ),
    st.builds(ev.Ready, RANKS, GENERATIONS),
    st.builds(ev.CannotReplay, RANKS, GENERATIONS, st.just("why")),
    st.builds(ev.Interrupted, RANKS, GENERATIONS, st.just("why")),
    st.builds(ev.Durable, RANKS, ITERATIONS, st.integers(0, 2), GENERATIONS, st.just("path")),
    st.builds(ev.Committed, ITERATIONS, st.integers(0, 2)),
    st.builds(ev.CheckpointWanted, RANKS, ITERATIONS, GENERATIONS),
    st.builds(ev.Finished, RANKS, GENERATIONS),
    st.builds(ev.Exited, MACHINES, GENERATIONS),
    st.builds(ev.Failed, MACHINES, GENERATIONS, st.just("why")),
    st.builds(
        ev.TimedOut,
        GENERATIONS,
        st.sampled_from(("agreeing", "recovering")),
        st.tuples(MACHINES, MACHINES),
        st.just("why"),
    ),
    st.builds(ev.Injected, st.just("fault")),
    st.builds(ev.Closed, st.just("why")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_journal_leaves_a_sound_state(events: list[ev.Event]) -> None:
    state = State()
    for event in [ev.Opened(3, restarts=1), *map(ev.Joined, "ABC"), *events]:
        before, state = state, step(state, event)
        members = [m for slot, m in enumerate(state.members) if m is not None and slot not in state.exited]
        places = [*members, *(m for m, _ in state.spares)]
        assert len(places) == len(set(places))
        assert state.phase == Phase.ENDED or not set(places) & state.fenced
        assert (state.committed or 0) >= (before.committed or 0)
        assert state.generation >= before.generation
        assert state.epoch >= before.epoch
        assert (state.plan is not None) == (state.phase in (Phase.RECOVERING, Phase.LIVE))
        assert state.wanted is None or state.wanted > (-1 if state.committed is None else state.committed)
        assert state.wanted is None or state.generation == before.generation
        assert before.phase != Phase.ENDED or state is before


def test_time_outs_are_applied_alike_by_everybody() -> None:
    """A set's order differs from process to process; names are chosen so that one order cannot be luck."""
    for i in range(20):
        names = [f"machine-{i}-{n}" for n in range(4)]
        state = State()
        for event in [ev.Opened(4), *map(ev.Joined, [*names, "X", "Y", "Z"])]:
            state = step(state, event)
        state = step(state, ev.TimedOut(1, "agreeing", (names[3], names[1], names[2]), "silent"))
        assert state.members == (names[0], "X", "Y", "Z")


@given(EVENTS)
def test_events_survive_the_journal(event: ev.Event) -> None:
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event)))) == event


def test_an_event_of_another_version_is_refused() -> None:
    with pytest.raises(SwiftError, match="same version"):
        event_from_dict({"event": "Teleported", "machine": "A"})
