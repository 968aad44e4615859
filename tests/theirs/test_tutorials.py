"""Loops in the form of torch's tutorials end as undisturbed ones do, their own checkpoints too.

That of the DDP tutorial, in epochs, is examples/train_epochs.py (tests/cluster/test_epochs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.cluster import ClusterRun, once, run_cluster
from tests.support.integrations import assert_same_file

SCRIPT = Path(__file__).parent / "scripts" / "tutorials.py"

Reference = Callable[[str], ClusterRun]


def run_tutorial(folder: Path, form: str, inject: str = "") -> ClusterRun:
    script = [str(SCRIPT), form, str(folder / "store"), str(folder / "out")]
    run = run_cluster(folder, machines=2, inject=inject, script=script)
    assert run.code == 0, run.output[-6000:]
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return once(tmp_path_factory, run_tutorial)


def checkpoint(run: ClusterRun, iteration: int) -> dict[str, torch.Tensor]:
    """The script's own, read in one process."""
    folder = run.folder / "out" / f"checkpoint-{iteration}"
    wanted = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(kind.size) for name, kind in wanted.items() if hasattr(kind, "size")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def thorough(*case: str) -> object:
    return pytest.param(*case, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("form", "at"),
    [
        ("fsdp2", "machine=1 iteration=7 point=optimizer"),
        thorough("fsdp2", "machine=0 iteration=4 point=optimizer"),
        thorough("fsdp2", "machine=0 iteration=4 point=between"),
        thorough("fsdp2", "machine=1 iteration=6 point=between"),
        ("pipeline", "machine=1 iteration=6 point=backward microbatch=2"),
        thorough("pipeline", "machine=0 iteration=6 point=forward microbatch=1"),
        thorough("pipeline", "machine=0 iteration=5 point=optimizer"),
        thorough("pipeline", "machine=1 iteration=4 point=between"),
    ],
)
def test_a_loss(form: str, at: str, tmp_path: Path, undisturbed: Reference) -> None:
    expected, run = undisturbed(form), run_tutorial(tmp_path, form, f"kill {at}")
    assert [recovery["mode"] for recovery in run.recoveries] == [
        {"fsdp2": "memory", "pipeline": "replay"}[form]
    ], run.output[-3000:]
    for rank in range(2):
        assert_same_file(run, expected, f"rank{rank}.pt")
    for iteration in (5, 10) if form == "fsdp2" else ():
        saved, original = checkpoint(run, iteration), checkpoint(expected, iteration)
        assert saved.keys() == original.keys()
        assert saved
        assert all(torch.equal(saved[name], original[name]) for name in original)
