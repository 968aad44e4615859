"""Templates with several stages per worker: brute force finds nothing better; what does not fit is said."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Kind, Schedule, is_allowed, most_kept, stages_of, worker_order
from swift_ft.errors import UsageError
from swift_ft.planning.layout import multi_stage
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import makespan_ns
from swift_ft.planning.layout.pipeline_template import PER_WORKER, TemplateOptions
from swift_ft.planning.layout.templates import best_template, smallest_pipeline

LAYERS = st.builds(
    LayerProfile, st.integers(1, 30), st.integers(1, 60), st.integers(0, 20), st.integers(0, 5)
)
SEVERAL = (
    Schedule.LOOPED_BFS,
    Schedule.INTERLEAVED,
    Schedule.ZERO_BUBBLE,
    Schedule.ZBV,
    Schedule.DUAL_PIPE_V,
)


def options_for(schedule: Schedule, microbatches: int | None = None, transfer_ns: int = 0) -> TemplateOptions:
    """Two stages per worker."""
    return TemplateOptions(microbatches, schedule, transfer_ns, 2)


def peak_bytes(
    costs: StageCosts, cut: tuple[int, ...], schedule: Schedule, workers: int, microbatches: int, size: int
) -> int:
    """The most that a device needs at any moment, from the order of actions."""
    worst = 0
    for worker in range(workers):
        own = stages_of(schedule, worker, workers=workers, chunks=2)
        kept = dict.fromkeys(own, 0)
        for action in worker_order(schedule, worker, workers=workers, chunks=2, microbatches=microbatches):
            if action.kind is Kind.FORWARD:
                kept[action.stage] += 1
            needed = sum(costs.memory(cut[stage], cut[stage + 1], size, kept[stage]) for stage in own)
            worst = max(worst, needed)
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                kept[action.stage] -= 1
    return worst


def brute_force(costs: StageCosts, nodes: int, options: TemplateOptions) -> int | None:
    """The smallest makespan of all cuts; None if none fits."""
    layers, schedule, times = len(costs.layers), options.schedule, []
    for size in costs.sizes:
        workers, over = divmod(nodes * costs.devices_per_node, size)
        microbatches = options.microbatches or PER_WORKER * workers
        if (
            over
            or costs.devices_per_node % size
            or not is_allowed(schedule, workers=workers, microbatches=microbatches, chunks=2)
        ):
            continue
        for borders in combinations(range(1, layers), 2 * workers - 1):
            cut = (0, *borders, layers)
            needed = peak_bytes(costs, cut, schedule, workers, microbatches, size)
            if costs.memory_bytes is None or needed <= costs.memory_bytes:
                stages = [costs.time(first, end, size) for first, end in pairwise(cut)]
                times.append(
                    makespan_ns(
                        stages, microbatches, schedule, workers=workers, transfer_ns=options.transfer_ns
                    )
                )
    return min(times, default=None)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_brute_force_finds_nothing_better(data: st.DataObject) -> None:
    layers = data.draw(st.lists(LAYERS, min_size=2, max_size=8))
    memory = data.draw(st.none() | st.integers(10, 150))
    costs = StageCosts(layers, data.draw(st.sampled_from([1, 1, 2])), memory)
    options = options_for(
        data.draw(st.sampled_from(SEVERAL)),
        data.draw(st.none() | st.integers(2, 9)),
        data.draw(st.sampled_from([0, 7])),
    )
    nodes = data.draw(st.integers(1, 3))
    best = brute_force(costs, nodes, options)
    if best is None:
        with pytest.raises(UsageError, match="would do"):
            best_template(costs, nodes, options)
        return
    found = best_template(costs, nodes, options)
    assert found.iteration_ns == best
    assert found.proven
    assert found.stages_per_worker == 2
    assert [stage.first for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert sum(stage.devices for stage in found.stages) == 2 * nodes * costs.devices_per_node


@settings(max_examples=40, deadline=None)
@given(st.lists(LAYERS, min_size=12, max_size=40), st.integers(2, 6), st.sampled_from(SEVERAL))
def test_a_search_that_is_cut_short_has_a_bound(
    layers: list[LayerProfile], nodes: int, schedule: Schedule
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_stage, "_MOST_ACTIONS", 0)
        patch.setattr(multi_stage, "_MOST_TRIED", 1000)
        found = best_template(StageCosts(layers), nodes, options_for(schedule))
    assert 0 < found.bound_ns <= found.iteration_ns


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=4, max_size=8), st.sampled_from(SEVERAL))
def test_a_bound_is_below_the_best_time(layers: list[LayerProfile], schedule: Schedule) -> None:
    best = brute_force(StageCosts(layers), 2, options_for(schedule))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_stage, "_MOST_TRIED", 1)
        found = best_template(StageCosts(layers), 2, options_for(schedule))
    assert best is not None
    assert found.bound_ns <= best <= found.iteration_ns


def test_equal_layers_are_proven_where_the_even_cut_is_best() -> None:
    layers = [LayerProfile(10, 20, 100)] * 16
    found = best_template(StageCosts(layers), 4, options_for(Schedule.INTERLEAVED))
    assert [stage.end - stage.first for stage in found.stages] == [2] * 8
    assert found.workers == 4
    assert found.gap < 0.05


def test_several_stages_leave_less_bubble() -> None:
    """Interleaving halves the bubble with two stages per worker (Megatron-LM's reason for it)."""
    layers = [LayerProfile(100, 200, 1)] * 16
    one = best_template(StageCosts(layers), 4)
    two = best_template(StageCosts(layers), 4, options_for(Schedule.INTERLEAVED))
    ideal = 16 * 300 * 16 // 4
    assert (one.iteration_ns - ideal) == 2 * (two.iteration_ns - ideal)


def test_memory_is_that_of_all_stages_of_a_worker() -> None:
    """Each worker holds two of four layers: two fit only without activations of eight microbatches."""
    layers = [LayerProfile(10, 20, 100, activation_bytes=10)] * 4
    options = options_for(Schedule.LOOPED_BFS, 8)
    needed = 2 * (100 + 8 * 10)
    assert best_template(StageCosts(layers, 1, needed), 2, options).workers == 2
    with pytest.raises(UsageError, match=rf"360 B per device|--memory {needed} would do"):
        best_template(StageCosts(layers, 1, needed - 1), 2, options)


def test_what_is_kept_at_the_same_time() -> None:
    """Worker 0 of 2 with two stages: GPipe's order keeps all, interleaved 1F1B what it warmed up with."""
    sizes = {"workers": 2, "chunks": 2, "microbatches": 4}
    assert most_kept(Schedule.LOOPED_BFS, 0, **sizes) == [(4, 4)]
    assert all(sum(moment) <= 6 for moment in most_kept(Schedule.INTERLEAVED, 0, **sizes))


@pytest.mark.parametrize(
    ("layers", "nodes", "options", "message"),
    [
        (5, 3, options_for(Schedule.INTERLEAVED), "5 layers make no 6 stages: .* 2 workers would do"),
        (8, 2, options_for(Schedule.DUAL_PIPE_V, 3), "3 are 1 too few for 4 stages"),
        (8, 2, options_for(Schedule.INTERLEAVED, 5), "1 are over: 4 would do"),
    ],
)
def test_what_does_not_fit_is_said(layers: int, nodes: int, options: TemplateOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        best_template(StageCosts([LayerProfile(1, 2, 3)] * layers), nodes, options)


def test_a_schedule_says_how_many_stages_it_takes() -> None:
    assert TemplateOptions(schedule=Schedule.ZBV).stages_per_worker == 2
    with pytest.raises(UsageError, match="zbv takes 2 stages per worker, not 3"):
        TemplateOptions(schedule=Schedule.ZBV, stages_per_worker=3)
    with pytest.raises(UsageError, match="1f1b takes one stage per worker, not 2"):
        TemplateOptions(stages_per_worker=2)


def test_the_smallest_pipeline_that_holds_the_model() -> None:
    costs = StageCosts([LayerProfile(1, 2, 100)] * 8, 1, 400)
    assert smallest_pipeline(costs, 4, options_for(Schedule.ZBV)) == 2
