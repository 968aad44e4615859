"""Which gradients DDP averages is decided when it is constructed, as under plain torch, and for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, one_line
from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "freezes.py"
MACHINES = 3
HABITS = ("frozen after", "frozen before", "gan")

Plain = Callable[[str], ClusterRun]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What plain torchrun leaves behind, without a session."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={MACHINES}"]
    done = subprocess.run(
        [*command, str(SCRIPT), "plain", str(folder), *HABITS],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return lambda habit: ClusterRun(folder / habit, 0, done.stderr, {})


@pytest.mark.parametrize(
    ("habit", "inject"),
    [
        ("frozen after", ""),
        ("frozen after", "kill machine=1 iteration=2 point=reduce"),  # while it is frozen
        ("frozen after", "kill machine=1 iteration=5 point=reduce"),
        ("gan", "kill machine=1 iteration=5 point=reduce bucket=1"),
        ("gan", "kill machine=1 iteration=5 point=optimizer"),  # of the discriminator
    ],
)
def test_the_gradients_of_plain_torch_are_averaged(
    tmp_path: Path, plain: Plain, habit: str, inject: str
) -> None:
    run = run_habit(tmp_path, SCRIPT, habit, machines=MACHINES, inject=inject)
    assert run.code == 0, run.output[-6000:]
    assert [recovery["mode"] for recovery in run.recoveries] == (["replica"] if inject else [])
    assert_same_files(run, plain(habit))


def test_what_was_frozen_before_ddp_is_averaged_by_nobody(tmp_path: Path, plain: Plain) -> None:
    run = run_habit(tmp_path, SCRIPT, "frozen before", "none", machines=MACHINES)  # nothing is compared
    assert run.code == 0, run.output[-6000:]
    assert_same_files(run, plain("frozen before"))


def test_what_was_frozen_before_ddp_is_named_where_replicas_come_apart(tmp_path: Path) -> None:
    run = run_habit(tmp_path, SCRIPT, "frozen before", machines=MACHINES)
    assert run.code == 1
    line = one_line(run)
    assert "replicas differ after iteration 3" in line
    assert "DDP averages no gradients of model.backbone.0.bias" in line
    assert "the memory of one of the machines" not in line


@pytest.mark.parametrize(("verify", "flags"), [("digest", ["--audit"]), ("replay", ["--verify-every", "2"])])
def test_sparse_gradients_are_verified(verify: str, flags: list[str], tmp_path: Path) -> None:
    """A bucket with such a gradient is shown otherwise than one with dense ones."""
    plain = run_habit(tmp_path / "plain", SCRIPT, "sparse")
    run = run_habit(tmp_path / "verified", SCRIPT, "sparse", verify, flags=flags)
    assert run.code == 0, run.output[-6000:]
    assert run.events("StepDiffered") == []
    assert_same_files(run, plain)


def test_sparse_gradients_survive_a_loss(tmp_path: Path) -> None:
    """On two machines: gloo's sparse all-reduce among three may fail by itself."""
    inject = "kill machine=1 iteration=5 point=reduce bucket=1"
    run = assert_put_back(tmp_path, SCRIPT, "sparse", inject=inject)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
