"""The exact time of an iteration, and how far the papers' sums are from it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.costs.schedule_orders import Kind, Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.makespan import StageTime, makespan_ns, one_f_one_b_ns, spans
from swift_ft.planning.layout.pipeline_time import autohet_ns, lower_bound_ns, oobleck_ns

TIMES = st.builds(StageTime, st.integers(0, 1000), st.integers(0, 1000))


def stages_of(*times: int) -> list[StageTime]:
    """Stages with these times, a third of each forward."""
    return [StageTime(time, 2 * time) for time in times]


def test_equal_stages_have_the_textbook_times() -> None:
    """Four stages of 3 ns, 16 microbatches: (N + S - 1) w under GPipe and 1F1B."""
    stages = stages_of(1, 1, 1, 1)
    assert makespan_ns(stages, 16, Schedule.GPIPE) == (16 + 3) * 3
    assert makespan_ns(stages, 16, Schedule.ONE_F_ONE_B) == (16 + 3) * 3
    assert makespan_ns(stages, 16, Schedule.INTERLEAVED, workers=2) == 16 * 6 + 3
    assert makespan_ns([StageTime(1, 2, 1)] * 4, 16, Schedule.ZERO_BUBBLE) < (16 + 3) * 3


def test_oobleck_is_too_low_for_a_slow_first_stage() -> None:
    """Notes of the paper's equations: w = (10, 1, 1, 1), 16 microbatches: 136, where 160 are needed."""
    stages = [StageTime(3 * w, 7 * w) for w in (10, 1, 1, 1)]
    assert oobleck_ns(stages, 16) == 1360
    assert makespan_ns(stages, 16) == lower_bound_ns(stages, 16) == 1600
    assert autohet_ns(stages, 16) == 1630


def test_zbv_has_no_bubble_when_its_three_passes_are_equal() -> None:
    """F = I = W: only the way down to the last worker is idle, and the last worker computes all the time."""
    done = spans([StageTime(1, 2, 1)] * 8, 16, Schedule.ZBV, workers=4)
    for worker, own in enumerate(done):
        assert own[-1].end_ns - own[0].begin_ns == 16 * 2 * 3, worker


@pytest.mark.parametrize(
    ("spread", "oobleck", "autohet"),
    [(0.0, (0.0, 0.0), (0.0, 0.0)), (0.1, (-0.02, 0.0), (0.0, 0.04)), (9.0, (-0.35, 0.0), (0.0, 0.15))],
)
def test_errors_of_the_papers_sums(
    spread: float, oobleck: tuple[float, float], autohet: tuple[float, float]
) -> None:
    """Relative errors over random stages: none for equal ones; Oobleck's are too low, AutoHet's too high."""
    random = Random(0)
    for _ in range(200):
        stages = stages_of(*(int(1000 * random.uniform(1, 1 + spread)) for _ in range(random.randint(2, 8))))
        exact = one_f_one_b_ns(stages, 4 * len(stages))
        assert oobleck[0] <= oobleck_ns(stages, 4 * len(stages)) / exact - 1 <= oobleck[1]
        assert autohet[0] <= autohet_ns(stages, 4 * len(stages)) / exact - 1 <= autohet[1]


@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 300))
def test_the_fast_path_of_1f1b_is_exact(stages: list[StageTime], more: int, transfer_ns: int) -> None:
    microbatches = len(stages) + more
    exact = makespan_ns(stages, microbatches, transfer_ns=transfer_ns)
    assert one_f_one_b_ns(stages, microbatches, transfer_ns) == exact
    assert lower_bound_ns(stages, microbatches, transfer_ns) <= exact


@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(1, 12))
def test_gpipe_is_two_waves(stages: list[StageTime], microbatches: int) -> None:
    forward, backward = [s.forward_ns for s in stages], [s.backward_ns for s in stages]
    waves = [sum(wave) + (microbatches - 1) * max(wave) for wave in (forward, backward)]
    assert makespan_ns(stages, microbatches, Schedule.GPIPE) == sum(waves)


@given(st.data())
def test_spans_respect_the_order_and_the_messages(data: st.DataObject) -> None:
    """Each action begins at the latest of what it waits for: no earlier, and no later."""
    schedule = data.draw(st.sampled_from(list(Schedule)))
    workers = data.draw(st.integers(1, 4))
    chunks = 1 if schedule.is_single else 2 if schedule.is_v else data.draw(st.integers(1, 3))
    microbatches = workers * data.draw(st.integers(2, 4))
    stages = data.draw(st.lists(TIMES, min_size=workers * chunks, max_size=workers * chunks))
    transfer = data.draw(st.integers(0, 100))
    done = spans(stages, microbatches, schedule, workers=workers, transfer_ns=transfer)
    of_stage = {span.action.stage: worker for worker, own in enumerate(done) for span in own}

    def sent(left: int) -> int:
        return transfer if of_stage[left] != of_stage[left + 1] else 0

    ends = {span.action: span.end_ns for own in done for span in own}
    back = {(a.stage, a.microbatch): end for a, end in ends.items() if a.kind in (Kind.BACKWARD, Kind.INPUT)}
    for own in done:
        clock = 0
        for span in own:
            kind, stage, microbatch = span.action
            ready = clock
            if kind is Kind.FORWARD and stage:
                ready = max(clock, ends[span.action._replace(stage=stage - 1)] + sent(stage - 1))
            elif kind in (Kind.BACKWARD, Kind.INPUT) and stage < len(stages) - 1:
                ready = max(clock, back[stage + 1, microbatch] + sent(stage))
            assert span.begin_ns == ready
            clock = span.end_ns
            assert clock - ready == stages[stage].of(kind)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="3 stages cannot be spread evenly over 2 workers"):
        makespan_ns(stages_of(1, 1, 1), 4, Schedule.INTERLEAVED, workers=2)
    with pytest.raises(UsageError, match="2 transfers for 2 stages"):
        makespan_ns(stages_of(1, 1), 4, transfer_ns=(1, 2))
    with pytest.raises(UsageError, match="1 too few"):
        one_f_one_b_ns(stages_of(1, 1), 1)
