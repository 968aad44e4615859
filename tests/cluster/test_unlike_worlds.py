"""Machines of a job with several pipelines die, and none come: pipelines of unlike numbers of stages follow.

Their weights, moments, schedulers and samples are those of a run that nothing disturbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from swift_ft.config.run_plan import plan_from_json
from swift_ft.data import samples_by_iteration
from tests.cluster.test_survivors import SHRINK, guests_of
from tests.support.cluster import SMALL, ClusterRun, assert_clean, run_cluster
from tests.support.worlds import given_up, worlds_of

SCRIPT = Path(__file__).parent / "scripts" / "shared_batches.py"
ITERATIONS = 24


def train(
    folder: Path,
    *args: str,
    machines: int = 6,
    inject: str = "",
    iterations: int = ITERATIONS,
    flags: Sequence[str] = (),
) -> ClusterRun:
    """A run to its end, in which a loss leads to fewer workers where it can."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SAMPLE_LOG", str(folder / "samples"))
        script = [str(SCRIPT), *options(folder, *args, iterations=iterations)]
        run = run_cluster(folder, machines=machines, script=script, inject=inject, flags=[*SHRINK, *flags])
    assert run.code == 0, run.output[-5000:]
    assert len(run.events("FaultInjected")) == inject.count("kill"), "a fault did not strike"
    return run


def options(folder: Path, *args: str, iterations: int) -> list[str]:
    """The script's arguments."""
    return [
        *SMALL,
        "--dropout=0.1",
        "--gamma=0.7",
        f"--store={folder / 'store'}",
        f"--weights-out={folder / 'weights'}",
        f"--iterations={iterations}",
        "--checkpoint-every=4",
        *args,
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Two pipelines of two stages that nothing disturbs."""
    return train(tmp_path_factory.mktemp("undisturbed"), machines=4)


def assert_same_layers(run: ClusterRun, undisturbed: ClusterRun) -> None:
    """All copies of each layer are equal, with what optimizers and schedulers keep."""
    expected = {name: tensor for own in at_end(undisturbed) for name, tensor in own.items()}
    found = [(name, tensor) for own in at_end(run) for name, tensor in own.items()]
    assert {name for name, _ in found} == expected.keys()
    assert not [name for name, tensor in found if not torch.equal(tensor, expected[name])]
    assert_clean(run)


def assert_same_state(run: ClusterRun, undisturbed: ClusterRun) -> None:
    """The same, and each sample came once."""
    assert_same_layers(run, undisturbed)
    samples, theirs = (samples_by_iteration(one.folder / "samples") for one in (run, undisturbed))
    assert {i: sorted(of) for i, of in samples.items()} == {i: sorted(of) for i, of in theirs.items()}


def at_end(run: ClusterRun) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted((run.folder / "weights").glob("rank*.pt"))]


def stages_of(run: ClusterRun) -> list[list[int]]:
    """The number of stages of each pipeline, in each world that followed a loss."""
    plans = [plan_from_json(state.worlds.present.plan) for state in worlds_of(run)]
    return [[len(pipeline.cut) for pipeline in plan.pipelines] for plan in plans]


def test_two_pipelines_of_three_stages_lose_a_machine(tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = train(tmp_path, inject="kill machine=1 iteration=5 point=forward microbatch=1")
    assert not given_up(run), run.output[-5000:]
    assert not guests_of(run)
    assert stages_of(run) == [[2, 3]]
    assert follows(run), "the session deals the batches"
    assert_same_state(run, undisturbed)


def follows(run: ClusterRun) -> bool:
    """Whether batches follow unlike numbers of microbatches, by what workers have reported."""
    return any(report.get("takes_unlike") for report in run.events("StatusReported"))


def test_each_pipeline_takes_an_equal_part_of_the_batch(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike pipelines have equally many microbatches then: others would have other numbers of samples."""
    monkeypatch.setenv("EQUAL_PARTS", "1")
    run = train(tmp_path, inject="kill machine=1 iteration=5 point=forward microbatch=1")
    assert stages_of(run) == [[2, 3]]
    assert not guests_of(run)
    (world,) = worlds_of(run)
    assert plan_from_json(world.worlds.present.plan).microbatches == (8, 8)
    assert not follows(run)
    assert_same_layers(run, undisturbed)


IN_TURN = (
    "kill machine=1 iteration=5 point=forward microbatch=1",
    "kill machine=0 iteration=10 point=backward microbatch=2",
    "kill machine=3 iteration=15 point=reducing",
    "kill machine=1 iteration=20 point=forward microbatch=1",
)
"""Machines are counted by their slots in the world of that time."""


def test_machines_are_lost_one_after_the_other(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """A pipeline gets shorter, the other one borrows, both merge; the last loss leads to a guest."""
    run = train(tmp_path, "--min-stages=2", inject="; ".join(IN_TURN))
    assert stages_of(run) == [[2, 3], [2, 2], [3]]
    assert "no smaller world can follow the loss" in run.output
    assert "nobody else holds what worker 1 held" in run.output
    assert guests_of(run) == 1
    assert [recovery["mode"] for recovery in run.recoveries] == ["continue"] * 3 + ["replay"]
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "second",
    [
        "kill machine=2 iteration=any point=offer",
        "kill worker=4 iteration=any point=offer",
        "kill machine=1 iteration=any point=prepared",
        "kill worker=3 iteration=any point=prepared",
        "kill machine=0 iteration=any point=take",
        "kill worker=4 iteration=any point=take",
    ],
)
def test_a_second_loss_in_the_change_leads_to_guests(
    second: str, tmp_path: Path, undisturbed: ClusterRun
) -> None:
    """The pipelines stay what they were, and machines run the workers of lost ones, too."""
    first = "kill machine=1 iteration=5 point=forward microbatch=1"
    run = train(tmp_path, inject=f"{first}; {second}")
    assert not worlds_of(run)
    assert given_up(run)
    assert guests_of(run)
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["optimizer", "between", "reduced", "reducing"])
def test_at_any_point_of_an_iteration(point: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    """A smaller world follows, or guests where survivors have no whole state of one iteration."""
    run = train(tmp_path, inject=f"kill machine=4 iteration=6 point={point}")
    assert len(worlds_of(run)) == len(run.events("ChangePlanned")) - len(given_up(run)) == 1
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_machines_of_two_workers(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """Two workers on each: the pipeline that loses a machine has half of its stages."""
    fault = "kill machine=2 iteration=6 point=forward microbatch=1"
    run = train(tmp_path, machines=4, inject=fault, flags=["--nproc-per-node=2"])
    assert stages_of(run) == [[2, 4]]
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_a_script_with_microbatches_of_its_own(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike pipelines follow, which take as many each as before. Merged ones would take fewer in all."""
    monkeypatch.setenv("OWN_MICROBATCHES", "1")
    faults = "; ".join(IN_TURN[:3])
    run = train(tmp_path, "--min-stages=2", inject=faults)
    assert stages_of(run) == [[2, 3], [2, 2]]
    assert "the script does not give model.microbatches to its schedule" in run.output
    assert guests_of(run) == 1
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_stages_that_take_turns_stay_alike(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """Two stages on each worker, of an interleaved schedule: two pipelines of one worker follow."""
    fault = "kill machine=1 iteration=6 point=forward microbatch=1"
    run = train(tmp_path, "--schedule=Interleaved1F1B", machines=4, inject=fault)
    (world,) = worlds_of(run)
    assert (world.world_size, world.worlds.present.plan) == (2, "")
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_in_the_end_one_machine_has_all_layers(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """Without a least number of stages, down to two machines that have all layers each, and then one."""
    faults = [f"kill machine=0 iteration={at} point=forward microbatch=0" for at in (5, 10, 15)]
    run = train(tmp_path, machines=4, inject="; ".join(faults))
    assert stages_of(run) == [[1, 2], [1, 1], [1]]
    assert not guests_of(run)
    assert_same_state(run, undisturbed)
