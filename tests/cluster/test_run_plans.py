"""Runs that begin with a plan: unlike cuts, unlike numbers of stages, unlike shares of the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_layer_replicas import assert_same_layers, modes
from tests.cluster.test_layouts import ALONE, DROPOUT, EVEN, layers_of
from tests.support.cluster import EXAMPLES, ClusterRun, assert_clean, one_line, run_cluster, training

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


ACROSS_MACHINES = {
    "pipelines": [
        {"stages": [[0, 2], [3, 9]], "microbatches": 8, "machines": [0, 2]},
        {"stages": [[0, 4], [5, 9]], "microbatches": 8, "machines": [0, 1]},
        {"stages": [[0, 6], [7, 9]], "microbatches": 8, "machines": [1, 2]},
    ],
    "workers_per_machine": 2,
}


def run_planned(
    folder: Path,
    *args: str,
    plan: object = None,
    machines: int,
    inject: str = "",
    spares: int = 0,
    script: Path = EVEN,
    workers: int = 1,
) -> ClusterRun:
    flags = ["--nproc-per-node", str(workers), *(["--spares", str(spares)] if spares else ALONE)]
    if plan is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
        flags += ["--plan", str(folder / "plan.json")]
    whole = training(folder, script, iterations=ITERATIONS)
    return run_cluster(folder, *args, inject=inject, machines=machines, flags=flags, script=whole)


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
    assert [len(layers) for layers in layers_of(run)] == [2, 6, 2]
    assert_clean(run)
    assert modes(run) == {"replay"}, run.output[-3000:]


@pytest.mark.parametrize(
    "lost",
    [
        "machine=0 iteration=5 point=reducing",
        pytest.param("machine=4 iteration=6 point=backward", marks=pytest.mark.thorough),
    ],
)
def test_two_and_three_stages(lost: str, tmp_path: Path, two_and_two: ClusterRun) -> None:
    run = run_planned(tmp_path, *EXACT, plan=TWO_AND_THREE, machines=5, spares=1, inject=f"kill {lost}")
    assert_same_layers(run, two_and_two)
    assert [len(layers) for layers in layers_of(run)] == [4, 6, 2, 5, 3]
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


@pytest.mark.thorough
def test_pipelines_across_machines(tmp_path: Path) -> None:
    """All copies of the first layers are lost, and the checkpoint has each layer, wherever it was."""
    reference = run_planned(tmp_path / "even", *DROPOUT, "--pipelines", "3", machines=6)
    both = "; ".join(f"kill machine={machine} iteration=9 point=forward" for machine in (0, 1))
    lost = tmp_path / "lost"
    run = run_planned(lost, *DROPOUT, plan=ACROSS_MACHINES, machines=3, workers=2, spares=2, inject=both)
    assert_same_layers(run, reference, pipelines=3)
    assert [len(layers) for layers in layers_of(run)] == [3, 5, 5, 7, 7, 3]
    assert modes(run) == {"fallback"}, run.output[-3000:]


def test_other_microbatches_than_planned(tmp_path: Path) -> None:
    plan = {"pipelines": [{"stages": [[0, 0], [1, 1]], "microbatches": 3}]}
    script = EVEN.with_name("unlike_pipelines.py")
    run = run_planned(tmp_path, plan=plan, machines=2, script=script)
    assert run.code == 2, run.output[-3000:]
    assert "gives 3 microbatches to pipeline 0, and its schedule has 2" in one_line(run)


def test_a_plan_for_a_script_without_a_stack(tmp_path: Path) -> None:
    plan = {"pipelines": [{"stages": [[0, 4], [5, 9]]}]}
    run = run_planned(tmp_path, plan=plan, machines=2, script=EXAMPLES / "train_swift.py")
    assert run.code == 2, run.output[-3000:]
    assert "the script trains no LayerStack" in one_line(run)


@pytest.mark.thorough
def test_layers_by_their_costs(tmp_path: Path, even: ClusterRun) -> None:
    """A dear embedding has a stage of its own, and what a lost machine had is replayed."""
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 0}
    costs = tmp_path / "layers.json"
    costs.write_text(json.dumps({"layers": [{**layer, "forward_s": 0.2}, *[layer] * 9]}))
    lost = "kill machine=2 iteration=6 point=optimizer"
    run = run_planned(tmp_path, *DROPOUT, "--costs", str(costs), machines=3, spares=1, inject=lost)
    assert_same_layers(run, even, pipelines=1)
    assert len(layers_of(run)[0]) == 1
    assert modes(run) == {"replay"}, run.output[-3000:]
