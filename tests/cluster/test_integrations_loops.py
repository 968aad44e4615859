"""Integrations with data parallelism: each loses a machine, and ends like an undisturbed run to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cluster import ClusterRun, once, one_line, run_cluster
from tests.support.integrations import assert_same_files, assert_same_state, needs, train

SCRIPTS = Path(__file__).parent / "scripts"

Reference = Callable[..., ClusterRun]


def run_replicas(folder: Path, example: str, *args: str, inject: str = "") -> ClusterRun:
    return train(
        folder, f"integrations/{example}.py", *args, "--out", str(folder / "out"), inject=inject, machines=2
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs of examples."""
    return once(tmp_path_factory, run_replicas)


def assert_restored(run: ClusterRun, reference: ClusterRun) -> None:
    """Both workers have what they would have had, and no completed iteration was lost."""
    assert_same_files(run, reference)
    assert_same_state(run, reference)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica"
    assert not any(recovery["iterations_lost"].values())


@pytest.mark.parametrize(
    ("precision", "fault"),
    [
        pytest.param("float16", "machine=0 iteration=5 point=between", id="the source of all statistics"),
        pytest.param("float16", "machine=1 iteration=7 point=between", id="after the last iteration"),
        pytest.param(
            "bfloat16", "machine=0 iteration=5 point=reducing", id="with half of the gradients summed"
        ),
    ],
)
def test_a_cnn(precision: str, fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    """BatchNorm, autocast, a gradient scaler, accumulation, an EMA with statistics, and a schedule."""
    what = ("ddp_cnn", "--precision", precision)
    run = run_replicas(tmp_path, *what, inject=f"kill {fault}")
    assert_restored(run, undisturbed(*what))
    saved = torch.load(tmp_path / "out" / "rank0.pt", weights_only=True)
    assert saved["ema"]["n_averaged"] == 8
    if precision == "float16":
        assert saved["scaler"]["scale"] > 2**16  # it grew: it is a state of its own


@pytest.mark.parametrize(
    "fault", ["machine=0 iteration=5 point=reducing", "machine=1 iteration=5 point=optimizer"]
)
@needs("lightning_fabric")
def test_fabric(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, "fabric_loop", inject=f"kill {fault}")
    assert_restored(run, undisturbed("fabric_loop"))


@pytest.mark.parametrize(
    "fault",
    [
        "machine=0 iteration=5 point=between",  # the other one is in its first microbatch, or before it
        "machine=1 iteration=5 point=reducing",
    ],
)
@needs("accelerate")
def test_accelerate(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, "accelerate_loop", inject=f"kill {fault}")
    assert_restored(run, undisturbed("accelerate_loop"))


def test_global_batches(tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, "any_replicas", inject="kill machine=1 iteration=5 point=reduced")
    assert_same_files(run, undisturbed("any_replicas"))


@needs("torchdata")
def test_a_stateful_loader(tmp_path: Path, undisturbed: Reference) -> None:
    run = run_replicas(tmp_path, "stateful_loader", inject="kill machine=0 iteration=5 point=between")
    assert_same_files(run, undisturbed("stateful_loader"))
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]


@needs("torchdata")
def test_a_stateful_loader_by_iterator(tmp_path: Path) -> None:
    """As its users have it: the survivor would take the next batch for the repeated iteration."""
    script = [str(SCRIPTS / "stream_by_iterator.py"), str(tmp_path / "store")]
    inject = "kill machine=1 iteration=5 point=reduce"
    run = run_cluster(tmp_path, inject=inject, machines=2, script=script)
    assert run.code == 2, run.output[-3000:]
    assert "Look batches up by step.index" in one_line(run)
