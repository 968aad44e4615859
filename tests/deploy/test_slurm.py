"""The Slurm recipe in a real Slurm cluster of this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.processes import leaves_nothing, module
from tests.deploy.recipes import DEPLOY
from tests.deploy.slurm import Slurm
from tests.support.cluster import processes_of, training
from tests.support.waiting import wait_until

RECIPE = DEPLOY / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def launchers(folder: Path) -> list[int]:
    """The launchers of a run, one for each node."""
    lines = [line for line in processes_of(folder) if "-m\\x00swift_ft.cli.run" in line]
    pids = {int(line.partition(":")[0]) for line in lines}
    return sorted(pid for pid in pids if _parent(pid) not in pids)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_job_survives_a_launcher_and_goes_on_after_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """A launcher is killed, and a spare takes over. Near its time limit the job queues itself."""
    variables = {
        "SPARES": "1",
        "WORKERS": "1",
        "SWIFT_RUN": module("swift_ft.cli.run", tmp_path),
        "SWIFT_STORE": module("swift_ft.cli.store", tmp_path),
    }
    script = [*training(tmp_path, iterations=260), "--checkpoint-every", "20"]
    flags = ["--heartbeat-timeout", "8", "--log-dir", str(tmp_path / "logs")]
    with leaves_nothing(tmp_path):
        job = slurm.submit("--nodes=3", str(RECIPE), *flags, *script, **variables)
        output = slurm.folder / "jobs" / f"swift-{job}.out"

        def said(text: str) -> bool:
            return output.exists() and text in output.read_text()

        wait_until(lambda: said("iteration 25:"), "training", 120)
        os.kill(launchers(tmp_path)[-1], signal.SIGKILL)
        wait_until(lambda: said("the launcher was killed, and starts again"), "its new start")
        wait_until(lambda: said("iteration 60:"), "training", 120)
        slurm.signal(job, "USR1")
        wait_until(lambda: slurm.state(job)["JobState"] == "PENDING", "the queue")
        assert "0 iterations lost" in output.read_text()
        slurm.start_now(job)
        wait_until(lambda: slurm.state(job)["JobState"] not in ("PENDING", "RUNNING"), "the job's end", 200)
        state = slurm.state(job)
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1")
        assert said("iteration 259:")
        assert output.read_text().count("iteration 0:") == 1
