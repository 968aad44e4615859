"""Runs that begin with a plan: unlike cuts, unlike numbers of stages, unlike shares of the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_layer_replicas import assert_same_layers, modes
from tests.cluster.test_layouts import ALONE, DROPOUT, EVEN
from tests.support.cluster import ClusterRun, assert_clean, run_cluster, training

EXACT = (*DROPOUT, "--exact")
ITERATIONS = 12
UNEVEN = {"pipelines": [{"stages": [[0, 1], [2, 7], [8, 9]]}]}
TWO_AND_THREE = {
    "pipelines": [
        {"stages": [[0, 3], [4, 9]], "microbatches": 5},
        {"stages": [[0, 1], [2, 6], [7, 9]], "microbatches": 11},
    ]
}
ONE_AND_TWO = {
    "pipelines": [
        {"stages": [[0, 9]], "microbatches": 7, "machines": [0]},
        {"stages": [[0, 4], [5, 9]], "microbatches": 9, "machines": [1, 2]},
    ],
    "workers_per_machine": 1,
}


def run_planned(
    folder: Path, *args: str, plan: object = None, machines: int, inject: str = "", spares: int = 0
) -> ClusterRun:
    flags = ["--spares", str(spares)] if spares else [*ALONE]
    if plan is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
        flags += ["--plan", str(folder / "plan.json")]
    script = training(folder, EVEN, iterations=ITERATIONS)
    return run_cluster(folder, *args, inject=inject, machines=machines, flags=flags, script=script)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """One pipeline of three stages, cut as evenly as can be."""
    return run_planned(tmp_path_factory.mktemp("even"), *DROPOUT, machines=3)


@pytest.fixture(scope="module")
def two_and_two(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Two pipelines of two stages that share microbatches evenly, without a plan."""
    return run_planned(tmp_path_factory.mktemp("two"), *EXACT, "--pipelines", "2", machines=4)


def test_an_uneven_cut(tmp_path: Path, even: ClusterRun) -> None:
    """Not one bit depends on it, also when a stage is lost and replayed."""
    run = run_planned(
        tmp_path, *DROPOUT, plan=UNEVEN, machines=3, spares=1, inject="kill machine=1 iteration=7"
    )
    assert_same_layers(run, even, pipelines=1)
    assert_clean(run)
    assert modes(run) == {"replay"}, run.output[-3000:]


@pytest.mark.parametrize(
    "lost", ["machine=0 iteration=5 point=reducing", "machine=4 iteration=6 point=backward"]
)
def test_two_and_three_stages(lost: str, tmp_path: Path, two_and_two: ClusterRun) -> None:
    run = run_planned(tmp_path, *EXACT, plan=TWO_AND_THREE, machines=5, spares=1, inject=f"kill {lost}")
    assert_same_layers(run, two_and_two)
    assert_clean(run)
    assert modes(run) == {"replica"}, run.output[-3000:]


def test_one_and_two_stages_and_no_spare(tmp_path: Path, two_and_two: ClusterRun) -> None:
    """A guest is in the pipeline of the lost machine, whose layers move."""
    run = run_planned(
        tmp_path, *EXACT, plan=ONE_AND_TWO, machines=3, inject="kill machine=1 iteration=4 point=reduced"
    )
    assert_same_layers(run, two_and_two)
    assert modes(run) == {"replica"}, run.output[-3000:]
    assert "machine 2 runs the workers of machine 1, too" in run.output
