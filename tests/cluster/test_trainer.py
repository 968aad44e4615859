"""The torchtitan-like trainer of `examples/integrations/titan/`, killed wherever its script may be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.cluster import EXAMPLES, ClusterRun, assert_undisturbed, once, run_cluster
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "titan_dies.py"
STEPS, VALIDATES_EVERY, SAVES_EVERY = 9, 3, 4
"""It validates after 2, 5 and 8, and saves after 3 and 7, as the session does."""


def run_trainer(
    folder: Path, *sizes: str, inject: str = "", dies: str = "{}", machines: int = 4, workers: int = 1
) -> ClusterRun:
    steps = [f"--training.steps={STEPS}", f"--validation.interval={VALIDATES_EVERY}"]
    own = [f"--checkpoint.interval={SAVES_EVERY}", f"--checkpoint.folder={folder / 'own'}"]
    with pytest.MonkeyPatch.context() as patch:
        folders = [os.environ["PYTHONPATH"], str(EXAMPLES / "integrations")]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        patch.setenv("DIES", dies)
        flags = ["--nproc-per-node", str(workers)]
        script = [str(SCRIPT), *steps, *own, *sizes]
        run = run_cluster(folder, inject=inject, machines=machines, flags=flags, script=script)
    assert run.code == 0, run.output[-6000:]
    return run


def dies(rank: int, step: int, where: str) -> str:
    return json.dumps({"rank": rank, "step": step, "where": where})


def assert_same_saves(run: ClusterRun, reference: ClusterRun) -> None:
    """The state at the end, and what the trainer saved on its own, are complete and the same to the bit."""
    for one in (run, reference):
        for commit in sorted((one.folder / "own").glob("step-*/.metadata")):
            dcp_to_torch_save(commit.parent, one.folder / "out" / f"{commit.parent.name}.pt")
    names = {path.name for path in (run.folder / "out").iterdir() if path.name.startswith("step")}
    assert names == {f"step-{step}.pt" for step in range(SAVES_EVERY, STEPS + 1, SAVES_EVERY)}
    assert_same_files(run, reference)


def mesh(**sizes: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}={size}" for name, size in sizes.items())


PIPELINES = mesh(dp_replicate=2)
"""Two pipelines of two stages: machines 0 and 1 have the first stage, 2 and 3 the last."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_trainer(tmp_path_factory.mktemp("undisturbed"), *PIPELINES))


thorough = pytest.mark.thorough


POINTS = {
    "before the forward": ("", dies(1, 5, "before")),
    "forward": ("kill machine=2 iteration=5 point=forward microbatch=2", "{}"),
    "backward": ("kill machine=0 iteration=6 point=backward microbatch=1", "{}"),
    "clip": ("", dies(3, 5, "clip")),
    "update": ("kill machine=1 iteration=6 point=optimizer", "{}"),
    "validation": ("", dies(0, 5, "validation")),
    "own save": ("", dies(0, 7, "save")),
    "between steps": ("kill machine=2 iteration=4 point=between", "{}"),
}


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p in ("clip", "own save") else thorough) for p in POINTS],
)
def test_a_loss(point: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    inject, death = POINTS[point]
    run = run_trainer(tmp_path, *PIPELINES, inject=inject, dies=death)
    assert_same_saves(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]


@dataclass(frozen=True)
class Layout:
    """A mesh, and the machines that it is on. A machine is replayed if it held all replicas of a stage."""

    sizes: tuple[str, ...]
    machines: int
    workers: int = 1
    way: str = "replay"


LAYOUTS = {
    "a pipeline": Layout((), machines=4),
    "8 machines": Layout(PIPELINES, machines=8, way="replica"),
    "4 machines of 2": Layout(PIPELINES, machines=4, workers=2),
}
LITTLE = ("--model.layers=2", "--training.microbatches=3")
SPLIT = {
    "split": Layout((*mesh(pp=2, tp=2), *LITTLE), machines=2, workers=2),
    "sharded and split": Layout((*mesh(pp=2, dp_shard=2, tp=2), *LITTLE), machines=4, workers=2),
    "replicated and split": Layout(
        (*mesh(pp=2, dp_replicate=2, tp=2), *LITTLE), machines=4, workers=2, way="replica"
    ),
}
"""A machine has both parts of what is split, and two machines a stage."""
LAYOUTS |= SPLIT


@pytest.fixture(scope="module")
def undisturbed_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ClusterRun]:
    """Undisturbed runs, by the name of the layout."""

    def run(folder: Path, name: str) -> ClusterRun:
        layout = LAYOUTS[name]
        return run_trainer(folder, *layout.sizes, machines=layout.machines, workers=layout.workers)

    return once(tmp_path_factory, run)


CHOSEN = {("sharded and split", "validation")}
"""Also in `make test`."""


@pytest.mark.parametrize(
    ("name", "point"),
    [
        pytest.param(name, point, marks=() if (name, point) in CHOSEN else thorough)
        for name in LAYOUTS
        for point in POINTS
    ],
)
def test_a_loss_in(
    name: str, point: str, tmp_path: Path, undisturbed_in: Callable[[str], ClusterRun]
) -> None:
    layout, undisturbed = LAYOUTS[name], undisturbed_in(name)
    inject, death = POINTS[point]
    inject = inject.replace("machine=2", f"machine={min(2, layout.machines - 1)}")
    run = run_trainer(
        tmp_path, *layout.sizes, inject=inject, dies=death, machines=layout.machines, workers=layout.workers
    )
    assert_same_saves(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == [layout.way], run.output[-3000:]
