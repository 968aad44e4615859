"""The simulator against table 5, closed forms, and runs small enough to work out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.planning.curves import best_intervals, interval_curves, mtbf_curves
from swift_ft.planning.presets import Workload, cluster_workload, preset_workload
from swift_ft.planning.simulation.failure_laws import Exponential, Trace, UniformCount, Weibull
from swift_ft.planning.simulation.inputs import MeasuredRecovery, calibrate
from swift_ft.planning.simulation.strategies import Cluster, Strategy
from swift_ft.planning.simulation.trials import Outcome, expected_s, simulate

TABLE_5 = {  # failure-free (table 4), global checkpoint, SWIFT: hours
    "wide-resnet-50": (479.4, 557.4, 480.7),
    "vit-128": (85.6, 86.4, 86.0),
    "bert-128": (461.1, 524.2, 476.1),
}


def hours(workload: Workload, **changes: Any) -> dict[str, Outcome]:
    given: dict[str, Any] = {
        "work_s": workload.work_s,
        "cluster": workload.cluster,
        "law": workload.law,
    } | changes
    return {outcome.strategy: outcome for outcome in simulate(workload.strategies, **given)}


@pytest.mark.parametrize("name", TABLE_5)
def test_table_5_hours_lost_to_failures(name: str) -> None:
    """Both cells of each row within 20 % plus 0.1 h of the hours lost."""
    free, checkpoint, swift = TABLE_5[name]
    workload = preset_workload(name)
    found = hours(workload)
    for strategy, published in (("global_checkpoint", checkpoint), (workload.swift, swift)):
        lost = published - free
        assert found[strategy].hours - free == pytest.approx(lost, abs=0.2 * lost + 0.1)


def test_optimal_checkpoint_frequencies_of_section_7_3() -> None:
    """§7.3, figure 13: at their best, SWIFT saves 1.3 h (BERT-128) and 11.8 h (Wide-ResNet-50)."""
    saved = {}
    for name, swift in (("bert-128", "swift_logging_parallel"), ("wide-resnet-50", "swift_replication")):
        workload = preset_workload(name)
        best = {
            s.name: expected_s(s, workload.work_s, workload.cluster, workload.law)
            for s in best_intervals(workload)
        }
        saved[name] = (best["global_checkpoint"] - best[swift]) / 3600
    assert saved["bert-128"] == pytest.approx(1.3, rel=0.1)
    assert saved["wide-resnet-50"] == pytest.approx(11.8, rel=0.1)


def test_figure_13_has_an_inner_optimum_and_figure_14_grows_with_failures() -> None:
    workload = preset_workload("bert-128")
    for curve in interval_curves(workload):
        lowest = curve.hours.index(min(curve.hours))
        assert 0 < lowest < len(curve.hours) - 1
    checkpoint, _, parallel = mtbf_curves(workload)
    assert list(checkpoint.hours) == sorted(checkpoint.hours, reverse=True)
    gain = [a / b for a, b in zip(checkpoint.hours, parallel.hours, strict=True)]
    assert gain == sorted(gain, reverse=True)
    assert gain[-1] > 1


@pytest.mark.parametrize("kind", ["rollback", "replication", "logging"])
def test_closed_form_for_exponential_failures(kind: str) -> None:
    strategy = Strategy("s", kind, 3600.0, 20.0, 15.0, 15.0, replay_factor=0.4)
    cluster, law = Cluster(machines=64), Exponential(64 * 5 * 3600.0)
    (found,) = simulate([strategy], work_s=200 * 3600.0, cluster=cluster, law=law, trials=300, seed=3)
    assert found.hours == pytest.approx(found.expected_hours, abs=2 * found.ci95_hours + 1e-3 * found.hours)


def test_no_fault_tolerance_starts_over() -> None:
    """E = (e^(rT) - 1) (1 / r + D) for one piece of work."""
    strategy = Strategy("none", "rollback", math.inf)
    cluster = Cluster(machines=1, detection_s=0, replacement_s=0, join_s=0)
    (found,) = simulate([strategy], work_s=1000.0, cluster=cluster, law=Exponential(1000.0), trials=4000)
    assert found.hours * 3600 == pytest.approx((math.e - 1) * 1000, rel=0.06)


CLUSTER = Cluster(machines=8, detection_s=1, replacement_s=2, join_s=3)


def one(
    strategy: Strategy, *failures: tuple[float, int], cluster: Cluster = CLUSTER
) -> tuple[float, Outcome]:
    (found,) = simulate([strategy], work_s=100.0, cluster=cluster, law=Trace(failures), trials=1)
    return round(found.hours * 3600, 9), found


CHECKPOINT = Strategy("c", "rollback", 10.0, save_stall_s=1.0, restore_s=4.0)
REPLICA = Strategy("r", "replication", 10.0, save_stall_s=1.0, restore_s=0.5, fallback_restore_s=4.0)
LOG = Strategy("l", "logging", 10.0, save_stall_s=1.0, restore_s=4.0, replay_factor=0.25)


@pytest.mark.parametrize(
    ("strategy", "failures", "wall_s"),
    [
        (CHECKPOINT, [], 110),  # 100 s and ten stalls
        (CHECKPOINT, [(26, 0)], 110 + 10 + 4),  # 24 s done, 20 s kept: 4 lost, 6 + 4 to come back
        (CHECKPOINT, [(21.5, 0)], 110 + 10 + 10.5),  # during the second stall: that save does not count
        (CHECKPOINT, [(26, 0), (30, 1)], 110 + 14 + 4),  # dies again 4 s into the recovery, which begins anew
        (REPLICA, [(26, 0)], 110 + 6.5),
        (REPLICA, [(26, 0), (27, 1)], 110 + 7.5),  # another one, its replica lives
        (REPLICA, [(26, 0), (27, 4)], 110 + 1 + 10 + 4),  # the replica of 0: back to the checkpoint
        (LOG, [(26, 3)], 110 + 10 + 1),  # 4 s lost, replayed in one
        (LOG, [(26, 3), (28, 4)], 110 + 2 + 10 + 2),  # a neighbour: aborted, both replayed together
        (LOG, [(26, 3), (28, 6)], 110 + 2 + 10 + 1),  # no neighbour: beside the first (Appendix B)
    ],
)
def test_by_hand(strategy: Strategy, failures: list[tuple[float, int]], wall_s: float) -> None:
    assert one(strategy, *failures)[0] == pytest.approx(wall_s)


def test_fallback_is_counted() -> None:
    assert one(REPLICA, (26, 0), (27, 4))[1].fallbacks == 1


def test_spares_replace_at_once_while_there_are_some() -> None:
    cluster = replace(CLUSTER, spares=1)
    assert one(REPLICA, (26, 0), cluster=cluster)[0] == pytest.approx(110 + 4.5)
    assert one(REPLICA, (26, 0), (60, 1), cluster=cluster)[0] == pytest.approx(110 + 4.5 + 6.5)
    repaired = replace(cluster, repair_s=10)
    assert one(REPLICA, (26, 0), (60, 1), cluster=repaired)[0] == pytest.approx(110 + 4.5 + 4.5)


def test_same_seed_same_result_and_same_failures_for_all() -> None:
    workload = preset_workload("bert-128")
    assert hours(workload, trials=20, seed=4) == hours(workload, trials=20, seed=4)
    assert hours(workload, trials=20, seed=4) != hours(workload, trials=20, seed=5)


def test_weibull_with_shape_one_is_exponential() -> None:
    strategy = Strategy("c", "rollback", 3600.0, 10.0, 10.0)
    cluster = Cluster(machines=32)
    mtbf = 32 * 6 * 3600.0
    law = Weibull(mtbf, 1.0)
    (found,) = simulate([strategy], work_s=100 * 3600.0, cluster=cluster, law=law, trials=200)
    assert found.hours * 3600 == pytest.approx(
        expected_s(strategy, 100 * 3600.0, cluster, Exponential(mtbf)), rel=0.02
    )


def test_llama_3_scale() -> None:
    """419 interruptions in 54 days on 16,384 GPUs: as many are drawn, and the order is right."""
    workload = cluster_workload(machines=16_384, mtbf_s=54 * 86400 * 16_384 / 419, work_s=54 * 86400)
    found = hours(workload, trials=10)
    assert found["swift_replication"].failures == pytest.approx(419, rel=0.05)
    assert math.isinf(found["no_fault_tolerance"].hours)
    order = ["swift_replication", "swift_logging_parallel", "swift_logging", "global_checkpoint"]
    assert [found[n].hours for n in order] == sorted(found[n].hours for n in order)


def test_calibration_replaces_assumptions_by_means() -> None:
    measured = [MeasuredRecovery("l", 2.0, 0.5, 3.0, 20, 0.5), MeasuredRecovery("l", 4.0, 1.5, 5.0, 20, 0.5)]
    (strategy,), cluster = calibrate([LOG], CLUSTER, measured)
    assert cluster.startup_s == 3.0
    assert (strategy.restore_s, strategy.replay_factor) == (1.0, 0.4)
    with pytest.raises(UsageError, match="none of"):
        calibrate([CHECKPOINT], CLUSTER, measured)


def test_calibration_keeps_each_strategy_s_own_start_up() -> None:
    """A restart of all processes takes longer than a replacement of one; their mean is neither."""
    measured = [MeasuredRecovery("l", 1.0, 0.5, 3.0, 20, 0.5), MeasuredRecovery("c", 9.0, 1.5, 10.0, 20, 0.5)]
    (log, checkpoint, replica), cluster = calibrate([LOG, CHECKPOINT, REPLICA], CLUSTER, measured)
    startups = [cluster.startup_s + strategy.extra_startup_s for strategy in (log, checkpoint, replica)]
    assert startups == [1.0, 9.0, 1.0]


def test_traces_name_machines_that_exist() -> None:
    with pytest.raises(UsageError, match="count from 0"):
        one(CHECKPOINT, (1.0, 8))


def test_uniform_count_is_the_paper_s_law() -> None:
    """§7.3: failures uniformly in the training done; each costs half an interval on average."""
    strategy = Strategy("c", "rollback", 100.0)
    cluster = Cluster(machines=2, detection_s=0, replacement_s=0, join_s=0)
    (found,) = simulate([strategy], work_s=10_000.0, cluster=cluster, law=UniformCount(20), trials=400)
    assert found.hours * 3600 == pytest.approx(10_000 + 20 * 50, rel=0.005)
