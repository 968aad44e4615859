"""Workers that end before the others, and machines that differ from the job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from swift_ft.config.store_address import StoreAddress
from swift_ft.launch.rendezvous.store_service import is_listening
from tests.support.cluster import ClusterRun, assert_identical, one_line, run_cluster, training
from tests.support.waiting import wait_until

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


def test_a_script_that_was_edited_runs_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, references: Any
) -> None:
    """On the spare, which joined before, and on the machine that is started in its place."""
    script = tmp_path / ENDS_EARLY.name
    shutil.copy(ENDS_EARLY, script)
    run = run_ending(
        tmp_path,
        "edit",
        0,
        monkeypatch=monkeypatch,
        script=script,
        inject="kill machine=1 iteration=6 point=forward; kill machine=1 iteration=7 point=forward",
    )
    assert "edited while it runs" in script.read_text()
    assert "edited while it runs" not in run.output
    assert len(run.recoveries) == 2
    assert_identical(run, references(machines=2))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "script",
            r"the script is bare\.py \(\w+\) here and bare\.py .*start it with the files that the job",
        ),
        ("argument", r"the script's --lr is 0\.2 here and 0\.1 in the job \(.*--may-differ on all machines"),
        ("variable", r"the variable OMP_NUM_THREADS is 2 here and 1 in the job \(.*--may-differ"),
    ],
)
def test_a_machine_that_differs_is_refused_and_the_job_goes_on(what: str, why: str, tmp_path: Path) -> None:
    port = free_port()
    other = tmp_path / BARE.name
    other.write_text(BARE.read_text() + "# changed\n")
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    flags += ["--may-differ", "scratch"]
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *flags, "--log-dir", str(tmp_path / "logs")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_FT_TOKEN": "a secret of this job"}

    def start(scratch: str, **different: str) -> subprocess.Popen[str]:
        script = str(other) if different.get("what") == "script" else str(BARE)
        rate = "0.2" if different.get("what") == "argument" else "0.1"
        threads = {"OMP_NUM_THREADS": "2"} if different.get("what") == "variable" else {}
        return subprocess.Popen(
            [*launcher, script, "--lr", rate, "--scratch", scratch],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**env, **threads},
        )

    first = start("/a")
    store = StoreAddress.tcp("127.0.0.1", port)
    wait_until(lambda: is_listening(store), "the store: the first launcher has opened the job")
    refused = start("/a", what=what)
    _, errors = refused.communicate(timeout=60)
    second = start("/b")
    for process in (second, first):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert refused.returncode == EXIT_KEPT_OUT, errors
    (line,) = errors.splitlines()
    assert re.search(f"swift-run: this machine differs from the others of the job: {why}", line), line
