"""Silent corruption on a GPU, over NCCL: a verified step finds it, and changes no bit where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.on_one_gpu import OnOneGpu
from tests.support.cluster import assert_computed_twice, assert_identical

COMPUTES_WRONG = Path(__file__).parents[1] / "cluster" / "scripts" / "computes_wrong.py"
VERIFY = ["--verify", "replay", "--verify-every", "2"]


@pytest.mark.parametrize(
    ("example", "fault"),
    [
        ("train_ddp", ""),
        ("train_swift", "kill machine=1 iteration=5 point=verify"),
    ],
)
def test_a_right_step_computed_twice(example: str, fault: str, tmp_path: Path, gpu: OnOneGpu) -> None:
    run = gpu.run(tmp_path, example, inject=fault, flags=VERIFY)
    assert_identical(run, gpu.undisturbed(example))
    assert run.events("StepDiffered") == []
    assert len(run.recoveries) == bool(fault)
    assert_computed_twice(run, 3)


@pytest.mark.parametrize(
    ("example", "what"), [("train_ddp", "product"), ("train_ddp", "parameter"), ("train_swift", "message")]
)
def test_a_flipped_bit(
    example: str, what: str, tmp_path: Path, gpu: OnOneGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 is named in that iteration, and the right result counts."""
    wrong = {"example": example, "iteration": 5, "rank": 1, "what": what}
    monkeypatch.setenv("WRONG", json.dumps(wrong))
    run = gpu.run(tmp_path, example, flags=VERIFY, through=COMPUTES_WRONG)
    assert len([*tmp_path.glob("struck-*")]) == 1
    (event,) = run.events("StepDiffered")
    assert (event["iteration"], event["ranks"], event["kind"], event["right"]) == (5, [1], "once", True)
    assert_identical(run, gpu.undisturbed(example))
