"""Workers that end before the others, and machines that differ from the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_ft.launch.store_service import is_listening
from swift_ft.store_address import StoreAddress
from tests.support.cluster import ClusterRun, one_line, run_cluster, training
from tests.support.waiting import free_port, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
ENDS_EARLY = SCRIPTS / "ends_early.py"
BARE = SCRIPTS / "bare.py"


def run_ending(
    folder: Path,
    how: str,
    *by: int,
    monkeypatch: pytest.MonkeyPatch,
    script: Path = ENDS_EARLY,
    **options: Any,
) -> ClusterRun:
    monkeypatch.setenv("ENDS", json.dumps({"by": by, "iteration": 5, "how": how}))
    return run_cluster(folder, machines=2, script=training(folder, script), **options)


def test_a_script_that_exits_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before any deadline: none of those that apply is shorter than the test's own."""
    run = run_ending(tmp_path, "exit", 1, monkeypatch=monkeypatch, flags=["--heartbeat-timeout", "400"])
    assert run.code == 1
    assert "worker 1 ended after 5 of 8 iterations with exit code 0, while worker 0" in one_line(run)
    assert not run.events("MachineLost")


def test_other_steps_are_an_error_before_the_first_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_ending(tmp_path, "steps", 1, monkeypatch=monkeypatch)
    assert run.code == 2
    assert "worker 1 ends after 5 iterations, and worker 0 after 8" in one_line(run)
    assert "iteration 0:" not in run.output


def test_a_script_that_was_edited_replaces_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the spare, which joined before, nor on the machine that is started in its place."""
    script = tmp_path / ENDS_EARLY.name
    shutil.copy(ENDS_EARLY, script)
    run = run_ending(
        tmp_path,
        "edit",
        0,
        monkeypatch=monkeypatch,
        script=script,
        inject="kill machine=1 iteration=6 point=forward",
        flags=["--join-timeout", "6"],
    )
    assert run.code == 1
    assert run.output.count("this machine differs from the others of the job: the script is ends_early") == 2
    assert "no machine joined for slots [1]" in run.output


@pytest.mark.thorough
def test_a_machine_with_another_script_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    port = free_port()
    other = tmp_path / BARE.name
    other.write_text(BARE.read_text() + "# changed\n")
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *flags, "--log-dir", str(tmp_path / "logs")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_FT_TOKEN": "a secret of this job"}
    first = subprocess.Popen(
        [*launcher, str(BARE)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    store = StoreAddress.tcp("127.0.0.1", port)
    wait_until(lambda: is_listening(store), "the store: the first launcher has opened the job")
    refused = subprocess.run(
        [*launcher, str(other)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    second = subprocess.run(
        [*launcher, str(BARE)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    output, _ = first.communicate(timeout=60)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert "swift-run: this machine differs from the others of the job: the script is bare.py (" in line
    assert (first.returncode, second.returncode) == (0, 0), output + second.stderr
