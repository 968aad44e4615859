"""torchtitan's own Trainer and loop lose a machine, and end like an undisturbed run to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.cluster import ClusterRun, once, one_line, run_cluster
from tests.support.integrations import assert_same_state, needs

pytestmark = needs("torchtitan", "torchdata", "datasets")

ROOT = Path(__file__).parents[2]
ON_CPUS = "tests.theirs.scripts.torchtitan_on_cpus"
CONFIG = ["--module", "tests.theirs.scripts.torchtitan_small", "--config", "small"]
# torch 2.13 has not what torchtitan's default, spmd_types, needs for more than a pipeline.
BY_DTENSOR = ["--parallelism.spmd_backend", "partial_dtensor"]


@dataclass(frozen=True)
class Mesh:
    """How the workers share the model.

    Attributes:
        sizes: torchtitan's arguments.
        workers: in all.
        mode: the way back of a lost worker.
        ours: further arguments.
    """

    sizes: dict[str, int]
    workers: int
    mode: str
    ours: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Of torchtitan."""
        sizes = [part for name, size in self.sizes.items() for part in (f"--parallelism.{name}", str(size))]
        return [*sizes, *([] if [*self.sizes] == ["pipeline_parallel_degree"] else BY_DTENSOR)]


REPLICAS = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
STAGES = {"pipeline_parallel_degree": 2}
IN_MEMORY = ("--swift.snapshot_every", "2")
MESHES = {
    "pp": Mesh(STAGES, 2, "replay"),
    "dp_replicate": Mesh(REPLICAS, 2, "replica"),
    "dp_shard": Mesh({"data_parallel_shard_degree": 2}, 2, "memory", IN_MEMORY),
    "tp": Mesh({"tensor_parallel_degree": 2}, 2, "memory", IN_MEMORY),
    "pp-dp_replicate": Mesh({**STAGES, **REPLICAS}, 4, "replica"),
}
DEATHS = ("forward", "backward", "optimizer", "validation", "save", "between")
QUICK = {("dp_replicate", "backward")}

Reference = Callable[[str], ClusterRun]


def train(folder: Path, mesh: Mesh, *further: str, death: str = "", code: int = 0) -> ClusterRun:
    """Trains eight steps: validation after the first and the fifth, a checkpoint after every fourth."""
    last = mesh.workers - 1
    inject, env = "", {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if death in ("optimizer", "between"):
        inject = f"kill machine={last} iteration=5 point={death}"
    elif death:
        step = {"validation": 5, "save": 4}.get(death, 6)
        env["DIES"] = f"{death} {step} {last} {folder / 'died'}"
    flags = ["--preload", f"{ON_CPUS},swift_ft.integrations.torchtitan"]
    script = ["-m", "swift_ft.integrations.torchtitan", "--swift.store", str(folder / "store")]
    script += ["--swift.checkpoint_every", "4", *mesh.ours, *CONFIG, *mesh.arguments]
    script += ["--dump_folder", str(folder / "titan"), *further]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        run = run_cluster(folder, inject=inject, machines=mesh.workers, flags=flags, script=script)
    assert run.code == code, run.output[-6000:]
    assert not death or inject or (folder / "died").exists()
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs, by the name of the mesh."""
    return once(tmp_path_factory, lambda folder, name: train(folder, MESHES[name]))


def curves(folder: Path) -> dict[str, dict[tuple[int, str], float]]:
    """What torchtitan's metrics were given, by worker, step and name. What is repeated is given once more."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    for path in sorted((folder / "titan" / "curves").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.stem] = {(line["step"], name): value for line in lines for name, value in line.items()}
    assert found
    return found


def assert_same_results(folder: Path, reference: Path, scratch: Path) -> None:
    """Checks curves, and all that torchtitan's own checkpoints hold, bit for bit."""
    ours, theirs = curves(folder), curves(reference)
    assert ours == theirs
    assert {step for step, _ in ours["rank0"]} == set(range(1, 9))
    for step in (4, 8):
        state, expected = (
            _checkpoint(one / "titan" / "checkpoint" / f"step-{step}", scratch) for one in (folder, reference)
        )
        assert state.keys() == expected.keys()
        assert {"train_state", "lr_scheduler", "dataloader"} <= {name.partition(".")[0] for name in expected}
        different = [name for name in expected if not _same(state[name], expected[name])]
        assert not different, different[:5]


def _checkpoint(folder: Path, scratch: Path) -> dict[str, Any]:
    dcp_to_torch_save(folder, scratch / "whole.pt")
    return dict(_flat(torch.load(scratch / "whole.pt", weights_only=False)))


def _flat(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}".removeprefix("."))
    else:
        yield path, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize(
    ("mesh", "death"),
    [
        pytest.param(mesh, death, marks=[] if (mesh, death) in QUICK else [pytest.mark.thorough])
        for mesh in MESHES
        for death in DEATHS
    ],
)
def test_a_machine_is_lost(mesh: str, death: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, MESHES[mesh], death=death)
    (recovery,) = run.recoveries
    assert recovery["mode"] == MESHES[mesh].mode
    assert_same_state(run, undisturbed(mesh))
    assert_same_results(tmp_path, undisturbed(mesh).folder, tmp_path)


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[] if mesh == "dp_replicate" else [pytest.mark.thorough]) for mesh in MESHES],
)
def test_torchrun_trains_the_same(mesh: str, tmp_path: Path, undisturbed: Reference) -> None:
    """The same arguments, given to torchtitan itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(MESHES[mesh].workers), "-m", ON_CPUS, "torchtitan.train"]
    done = subprocess.run(
        [*launcher, *CONFIG, *MESHES[mesh].arguments, "--dump_folder", str(tmp_path / "titan")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert_same_results(undisturbed(mesh).folder, tmp_path, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        (("--training.no-disable_cuda_graphs",), "--training.disable_cuda_graphs"),
        (("--checkpoint.async_mode", "async"), "--checkpoint.async_mode disabled"),
    ],
)
def test_what_a_loss_would_break_is_refused(argument: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    run = train(tmp_path, MESHES["dp_replicate"], *argument, code=2)
    assert f"add {remedy}" in one_line(run)


@pytest.mark.thorough
def test_a_later_step_of_torchtitans_own_checkpoint_is_refused(
    tmp_path: Path, undisturbed: Reference
) -> None:
    shutil.copytree(undisturbed("dp_replicate").folder / "titan", tmp_path / "titan")
    run = train(tmp_path, MESHES["dp_replicate"], code=2)
    assert "its own checkpoint of step 8" in one_line(run)
