"""Machines of a job with several pipelines die, and none come: pipelines of unlike numbers of stages follow.

Their weights, moments, schedulers and samples are those of a run that nothing disturbs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_ft.config.run_plan import plan_from_json
from swift_ft.data import samples_by_iteration
from tests.cluster.test_survivors import SHRINK, guests_of
from tests.support.cluster import SMALL, ClusterRun, assert_clean, run_cluster
from tests.support.worlds import given_up, worlds_of

SCRIPT = Path(__file__).parent / "scripts" / "unlike_worlds.py"
ITERATIONS = 24


def train(
    folder: Path, *args: str, machines: int = 6, inject: str = "", iterations: int = ITERATIONS
) -> ClusterRun:
    script = [
        str(SCRIPT),
        *SMALL,
        "--dropout=0.1",
        f"--store={folder / 'store'}",
        f"--weights-out={folder / 'weights'}",
        f"--iterations={iterations}",
        "--checkpoint-every=4",
        *args,
    ]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SAMPLE_LOG", str(folder / "samples"))
        run = run_cluster(folder, machines=machines, script=script, inject=inject, flags=SHRINK)
    assert run.code == 0, run.output[-5000:]
    assert len(run.events("FaultInjected")) == inject.count("kill"), "a fault did not strike"
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Two pipelines of two stages that nothing disturbs."""
    return train(tmp_path_factory.mktemp("undisturbed"), machines=4)


def assert_same_state(run: ClusterRun, undisturbed: ClusterRun) -> None:
    """All copies of each layer are equal, with what optimizers and schedulers keep; each sample came once."""
    expected = {name: tensor for own in at_end(undisturbed) for name, tensor in own.items()}
    found = [(name, tensor) for own in at_end(run) for name, tensor in own.items()]
    assert {name for name, _ in found} == expected.keys()
    assert not [name for name, tensor in found if not torch.equal(tensor, expected[name])]
    samples, theirs = (samples_by_iteration(one.folder / "samples") for one in (run, undisturbed))
    assert {i: sorted(of) for i, of in samples.items()} == {i: sorted(of) for i, of in theirs.items()}
    assert_clean(run)


def at_end(run: ClusterRun) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted((run.folder / "weights").glob("rank*.pt"))]


def cuts_of(run: ClusterRun) -> list[list[list[int]]]:
    """The layers of each stage of each pipeline, in each world that followed a loss."""
    plans = [plan_from_json(state.worlds.present.plan) for state in worlds_of(run)]
    return [[[*pipeline.cut] for pipeline in plan.pipelines] for plan in plans]


def test_two_pipelines_of_three_stages_lose_a_machine(tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = train(tmp_path, inject="kill machine=1 iteration=5 point=forward microbatch=1")
    assert not given_up(run), run.output[-5000:]
    assert not guests_of(run)
    assert cuts_of(run) == [[[5, 5], [3, 3, 4]]]
    assert_same_state(run, undisturbed)


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
    assert cuts_of(run) == [[[5, 5], [3, 3, 4]], [[5, 5], [5, 5]], [[3, 3, 4]]]
    assert "no smaller world can follow the loss" in run.output
    assert "nobody else holds what worker 1 held" in run.output
    assert guests_of(run) == 1
    assert [recovery["mode"] for recovery in run.recoveries] == ["continue"] * 3 + ["replay"]
    assert_same_state(run, undisturbed)
