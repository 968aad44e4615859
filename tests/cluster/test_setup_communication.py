"""What a script communicates before its first step is given to a replacement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, one_line, run_cluster, training

SCRIPT = Path(__file__).parent / "scripts" / "sets_up.py"


def run_set_up(folder: Path, *args: str, machines: int = 4, inject: str = "") -> ClusterRun:
    return run_cluster(folder, *args, machines=machines, inject=inject, script=training(folder, SCRIPT))


def learnt_by(run: ClusterRun, rank: int) -> list[dict[str, object]]:
    """What a worker learnt from the others, in each of its lives."""
    return [json.loads(line) for line in (run.folder / f"learnt{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["pipeline", "ddp"])
def test_a_replacement_learns_what_the_lost_worker_did(kind: str, tmp_path: Path) -> None:
    args, machines = (["--ddp"], 2) if kind == "ddp" else ([], 4)
    reference = run_set_up(tmp_path / "undisturbed", *args, machines=machines)
    faults = "kill machine=0 iteration=4 point=optimizer; kill machine=1 iteration=6 point=optimizer"
    run = run_set_up(tmp_path / "killed", *args, machines=machines, inject=faults)
    assert_identical(run, reference)
    assert [r["mode"] for r in run.recoveries] == ["replica" if args else "replay"] * 2
    for machine in (0, 1):
        lives = learnt_by(run, machine)
        assert len(lives) == 2
        assert lives[0] == lives[1]
        assert lives[0]["settings"] == learnt_by(run, 0)[0]["settings"]  # drawn anew in each run


def test_what_no_replacement_could_be_given_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = run_set_up(tmp_path, "--large", machines=2)
    assert run.code == 2
    assert re.search(
        r"sets_up\.py:\d+ \(main\) calls broadcast before the first step\..* more than the 65.5 kB",
        one_line(run),
    ), one_line(run)
