"""The protocol's table against what the simulation and the scenarios see: nothing more, and nothing less."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import TRANSITIONS, step
from swift_ft.testing.simulation import JobKind, make_job
from tests.support.recording_scenario import RecordingScenario

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.txt"))
RUNS = (
    (JobKind.PIPELINE, 4, 1, 600),
    (JobKind.PIPELINE, 2, 2, 200),
    (JobKind.ADJACENT, 5, 1, 200),
    (JobKind.REPLICATED, 3, 1, 150),
    (JobKind.STAGED, 4, 1, 150),
    (JobKind.BARE, 3, 1, 300),
)

Seen = set[tuple[Phase, type[ev.Event], Phase]]


def transitions_of(events: Iterable[ev.Event]) -> Seen:
    """Phase, event and next phase of each event that changes the state."""
    seen, state = Seen(), State()
    for event in events:
        before, state = state, step(state, event)
        if state is not before:
            seen.add((before.phase, type(event), state.phase))
    return seen


def seen_by_scenarios() -> Seen:
    seen = Seen()
    for path in SCENARIOS:
        scenario = RecordingScenario()
        scenario.run(path)
        seen |= transitions_of(scenario.events)
    return seen


def seen_by_simulation() -> Seen:
    seen = Seen()
    for kind, machines, workers, seeds in RUNS:
        for seed in range(seeds):
            job = make_job(kind, seed, machines, workers)
            job.run()
            seen |= transitions_of(job.events)
    return seen


def test_the_table_is_what_happens() -> None:
    table = {
        (phase, event, after) for (phase, event), following in TRANSITIONS.items() for after in following
    }
    seen = seen_by_scenarios() | seen_by_simulation()
    assert not seen - table, "these transitions are missing in the table"
    assert not table - seen, "these transitions of the table are never seen"


def test_every_event_is_heard_somewhere() -> None:
    assert {event for _, event in TRANSITIONS} == set(ev.EVENTS.values())


def test_nothing_is_heard_after_the_end() -> None:
    assert not [phase for phase, _ in TRANSITIONS if phase == Phase.ENDED]
