"""A run whose injected fault never struck says so in its last line, and ends with exit code 1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft.faults import fail_at
from swift_ft.testing.chaos.running import run_trial
from swift_ft.testing.chaos.trial import Outcome, Training
from tests.support.cluster import EXAMPLES, ClusterRun, one_line, run_cluster

BARE = Path(__file__).parent / "scripts" / "bare.py"
TINY = ("--layers=2", "--width=16", "--heads=2", "--sequence=16", "--microbatch-size=1", "--microbatches=2")


def train(store: str) -> list[str]:
    places = ("--iterations", "4", "--checkpoint-every", "2", "--store", store)
    return [str(EXAMPLES / "train_ddp.py"), *TINY, *places]


def run_ddp(folder: Path, inject: str) -> ClusterRun:
    return run_cluster(folder, machines=2, inject=inject, script=train(str(folder / "store")))


def assert_never_struck(run: ClusterRun, *missed: str) -> str:
    assert run.code == 1, run.output[-3000:]
    assert run.report["ok"]
    assert run.report["missed_faults"] == list(missed)
    last = run.output.splitlines()[-1]
    assert last.startswith(f"swift-run: --inject '{missed[-1]}' never struck: ")
    return last


def test_a_point_that_ddp_never_passes(tmp_path: Path) -> None:
    fault = "kill machine=1 iteration=2 point=forward"
    run = run_ddp(tmp_path, fault)
    last = assert_never_struck(run, fault)
    assert last == one_line(run)
    assert "no worker here has passed point=forward, only between, " in last
    assert ", optimizer, " in last
    assert not run.recoveries


def test_one_of_two_faults_strikes(tmp_path: Path) -> None:
    """The point is passed, by the machine too, but not in that iteration."""
    missed = "kill machine=1 iteration=40 point=optimizer committed=38"
    run = run_ddp(tmp_path, f"{missed}; kill machine=0 iteration=2 point=optimizer")
    last = assert_never_struck(run, missed)
    assert "workers have passed point=optimizer, but not machine 1 in iteration 40." in last
    assert [recovery["slots"] for recovery in run.recoveries] == [[0]]


def test_a_script_without_a_session_has_no_points(tmp_path: Path) -> None:
    run = run_cluster(tmp_path, machines=2, inject="kill machine=1 iteration=0", script=[str(BARE)])
    last = assert_never_struck(run, "kill machine=1 iteration=0 point=between")
    assert "without a swift_ft.Session there are none" in last


def test_a_run_that_fails_says_that_alone(tmp_path: Path) -> None:
    faults = "raise worker=0 iteration=1 point=optimizer; kill machine=1 iteration=3 point=forward"
    run = run_ddp(tmp_path, faults)
    assert run.code == 1
    assert "InjectedError" in run.output.splitlines()[-1]
    assert "never struck" not in run.output


def test_each_launcher_of_several_hosts_knows_it(tmp_path: Path) -> None:
    """From the journal: one strikes on the other launcher's machine, and one nowhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    faults = "break worker=1 iteration=2 point=optimizer; kill machine=0 iteration=2 point=forward"
    command = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", "2", "--inject", faults]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--log-dir", str(tmp_path)]
    both = [
        subprocess.Popen(
            [*command, *train(str(tmp_path / "store"))],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    for launcher in both:
        last = launcher.communicate(timeout=120)[1].splitlines()[-1]
        assert launcher.returncode == 1
        assert last.startswith(
            "swift-run: --inject 'kill machine=0 iteration=2 point=forward' never struck: "
        )
        assert "only between, " in last


@pytest.mark.parametrize("both", [False, True])
def test_chaos_does_not_count_it_as_identical(tmp_path: Path, both: bool) -> None:
    """A plan of which a part strikes is compared; what did not strike is named."""
    launch = ("--standalone", "--machines", "2", "--spares", "1")
    training = Training(launch, tuple(train("{folder}/store")), "{folder}/store", deadline_s=120)
    plan = [fail_at(iteration=1, machine=1, point="forward")]
    if both:
        plan.append(fail_at(iteration=1, machine=1, point="optimizer"))
    trial = run_trial(training, tmp_path, plan)
    assert trial.outcome == (Outcome.IDENTICAL if both else Outcome.NOT_STRUCK), trial.reason
    assert trial.missed == (str(plan[0]),)
    assert trial.state
