"""A run is resumed with other shards: with more or fewer workers, or none that share anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.manifest import MANIFEST
from swift_ft.recovery.layout.mesh import Layout, held_by, tiles_of
from swift_ft.recovery.layout.tensors import StateTensor, kept_for
from swift_ft.recovery.moves.reads import plan_reads
from tests.support.cluster import CHECKPOINT_EVERY, EXAMPLES, ClusterRun, one_line, run_cluster, training
from tests.support.reshard import FilesOfPart, planned_bytes

SCRIPT = Path(__file__).parent / "scripts" / "resharded.py"
AT = 2 * CHECKPOINT_EVERY
WIDTH = 24  # as in the script
ROWS = (("tp", 0),)
SPLIT: dict[str, dict[str, tuple[tuple[str, int], ...]]] = {
    "fsdp": {"0.weight": ROWS, "0.bias": ROWS, "2.weight": ROWS, "2.bias": ROWS},
    "tensor parallelism": {"0.weight": ROWS, "0.bias": ROWS, "2.weight": (("tp", 1),), "2.bias": ()},
}
"""Which dimension of each parameter is cut."""


def run(folder: Path, machines: int, *flags: str, iterations: int = AT) -> ClusterRun:
    script = training(folder, SCRIPT, iterations=iterations)
    return run_cluster(folder, machines=machines, flags=["--spares", "0", *flags], script=script)


def whole(folder: Path, machines: int) -> dict[str, torch.Tensor]:
    """The state after AT iterations, put together from what each worker had."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(machines):
        parts: dict[str, Any] = torch.load(folder / "weights" / f"{machines}-{rank}.pt")
        for name, (box, values) in parts.items():
            if box is None:
                assert torch.equal(found.setdefault(name, values), values)
                continue
            shape, offset = box
            target = found.setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(a, a + size) for a, size in zip(offset, values.shape, strict=True))] = values
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def tensors(how: str) -> list[StateTensor]:
    """The whole state, and how it is cut."""
    shapes = {
        "0.weight": (2 * WIDTH, WIDTH),
        "0.bias": (2 * WIDTH,),
        "2.weight": (WIDTH, 2 * WIDTH),
        "2.bias": (WIDTH,),
    }
    found = []
    for name, shape in shapes.items():
        parameter = StateTensor(name, shape, 4, (0,), SPLIT[how][name])
        of_adamw = {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        found += [parameter, *(kept_for(parameter, key, own, 4) for key, own in of_adamw.items())]
    return found


def planned(how: str, first: int, then: int, store: Path) -> dict[str, dict[str, int]]:
    """What each worker reads by origin, planned from the two layouts and the sizes of the files alone."""
    state = tensors(how)
    held, wanted = (
        held_by(state, tiles_of(state, Layout((((0, 0),),), tp=workers))) for workers in (first, then)
    )
    files = {rank: files_of_part(store, rank) for rank in range(first)}
    on_disks = {rank for rank in range(first) if rank < then}  # a machine serves what it has
    found: dict[str, dict[str, int]] = {"own_disk": {}, "peers": {}, "store": {}}
    for rank in range(then):
        plan = plan_reads(wanted[rank], held, own=min(rank, first - 1))
        assert not plan.missing
        load = planned_bytes(plan, files, {rank} & on_disks, on_disks - {rank})
        for origin, by_rank in found.items():
            by_rank[str(rank)] = getattr(load, origin)
    return found


def files_of_part(store: Path, rank: int) -> FilesOfPart:
    (part,) = (store / "checkpoints" / f"{AT:08d}").glob(f"rank-{rank:05d}*")
    sizes = {file.name: file.stat().st_size for file in part.iterdir() if file.name != MANIFEST}
    of_tensors = sizes.pop("__0_1.distcp")
    return FilesOfPart(plain=sum(sizes.values()), tensors=of_tensors)


@pytest.mark.parametrize(
    ("how", "first", "then"), [("fsdp", 2, 3), ("tensor parallelism", 2, 1), ("tensor parallelism", 2, 4)]
)
def test_the_state_is_what_it_was(
    how: str, first: int, then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "fsdp" if how == "fsdp" else "tp")
    monkeypatch.setenv("AT", str(AT))
    monkeypatch.setenv("LOCAL", str(tmp_path / "disks"))
    begun = run(tmp_path, first)
    assert begun.code == 0, begun.output[-3000:]
    expected = whole(tmp_path, first)
    resumed = run(tmp_path, then, "--resume", iterations=AT + 3)
    assert resumed.code == 0, resumed.output[-3000:]
    found = whole(tmp_path, then)
    assert found.keys() == expected.keys()
    assert "optimizer.exp_avg of model.0.weight" in found
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    (load,) = resumed.report["loads"]
    plan = planned(how, first, then, tmp_path / "store")
    assert {origin: load[origin] for origin in plan} == plan
    assert sum(plan["own_disk"].values()) > 0
    assert (sum(plan["peers"].values()) > 0) == (then > 1)
    assert (sum(plan["store"].values()) > 0) == (then < first)


def of_stages(folder: Path, script: str, machines: int, parts: int, iterations: int) -> ClusterRun:
    """A pipeline whose stages are divided, resumed where its store has a checkpoint."""
    places = training(folder, script_of(script), iterations=iterations)
    flags = ["--spares", "0", "--auto-resume"]
    return run_cluster(folder, machines=machines, flags=flags, script=[*places, "--parts", str(parts)])


def script_of(name: str) -> Path:
    """An example, or a script of these tests."""
    return (EXAMPLES if name.startswith("train_") else SCRIPT.parent) / f"{name}.py"


def test_stages_that_name_their_layers_alike(tmp_path: Path) -> None:
    """Each resumes with the layers of the same stage. In other stages nobody could say which is meant."""
    ends = []
    for script in ("train_tensor_parallel", "stages_named_alike"):
        folder = tmp_path / script
        assert of_stages(folder, script, 4, 2, AT).code == 0
        resumed = of_stages(folder, script, 2, 1, AT + 4)
        assert resumed.code == 0, resumed.output[-3000:]
        ends.append([torch.load(folder / "weights" / f"rank{rank}.pt") for rank in range(2)])
    for named, anonymous in zip(*ends, strict=True):
        assert named.keys() != anonymous.keys()
        pairs = zip(named.values(), anonymous.values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    refused = of_stages(tmp_path / "stages_named_alike", "stages_named_alike", 2, 2, AT + 8)
    assert refused.code == 2, refused.output[-3000:]
    assert "is in stage 0 of 2 and in stage 1 of 2, with other values" in one_line(refused)
