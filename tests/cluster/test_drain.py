"""``swift-recover drain``: a machine hands over to a spare, and no completed iteration is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from tests.support.cluster import ClusterRun, assert_clean, assert_identical, run_cluster, training
from tests.support.waiting import wait_until

LONG = ("--iterations", "120")
OWN_DISKS = Path(__file__).parent / "scripts" / "own_disks.py"


class Running(threading.Thread):
    """A run in the background, of four machines unless told otherwise. It can be asked for something."""

    def __init__(self, folder: Path, spares: int, *more: str, **job: Any) -> None:
        super().__init__(daemon=True)
        self._folder, self._spares, self._more, self._job = folder, spares, more, job
        self.outcome: ClusterRun | None = None
        self.start()
        wait_until(lambda: any((folder / "store").glob("checkpoints/*/committed.json")), "a checkpoint")
        self.endpoint, self.run_id = (folder / "endpoint").read_text().split()

    def run(self) -> None:
        flags = ["--spares", str(self._spares), "--endpoint-out", str(self._folder / "endpoint")]
        arguments = () if "script" in self._job else LONG
        self.outcome = run_cluster(self._folder, *arguments, flags=[*flags, *self._more], **self._job)

    def end(self) -> ClusterRun:
        self.join(200)
        assert self.outcome is not None
        return self.outcome


def test_a_machine_is_drained(tmp_path: Path, references: Any, capfd: pytest.CaptureFixture[str]) -> None:
    script = [*training(tmp_path, OWN_DISKS), *LONG]
    running = Running(tmp_path, 1, script=script)
    assert main(["drain", "1", "--rdzv-endpoint", running.endpoint]) == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].endswith(" waits for a checkpoint")
    assert " has left after " in told[-1]
    assert told[-1].endswith(" fills its slot")
    run = running.end()
    assert_identical(run, references(*LONG))
    assert_clean(run)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["slots"]) == ("replay", [1])
    assert recovery["reasons"] == ["it was drained"]
    assert not any(recovery["iterations_lost"].values())
    assert recovery["replayed_iterations"]["1"] <= 10  # the checkpoint was saved for this
    assert "] machine 1 is asked to leave by " in run.output
    assert "] machine 1 leaves: it was drained" in run.output
    assert len(list((tmp_path / "disks").iterdir())) == 5
    assert not list((tmp_path / "disks").glob("*/swift-ft-spool-*")), "no other worker has these disks"


@pytest.mark.thorough
def test_a_machine_leaves_without_a_spare(
    tmp_path: Path, references: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another one runs its workers, too, from then on."""
    running = Running(tmp_path, 0, "--elastic-wait", "0")
    assert main(["drain", "1", "--rdzv-endpoint", running.endpoint]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith(" fills its slot")
    run = running.end()
    assert_identical(run, references(*LONG))
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["slots"], recovery["reasons"]) == ("replay", [1], ["it was drained"])
    assert not any(recovery["iterations_lost"].values())
    assert "machine 0 runs the workers of machine 1, too" in run.output


def test_a_job_goes_on_with_fewer_machines(
    tmp_path: Path, references: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The spare leaves first. The last machine to leave is a host: its guest's slot goes with its own."""
    running = Running(tmp_path, 1, "--elastic-wait", "0")
    assert main(["scale", "1", "--same-workers", "--rdzv-endpoint", running.endpoint]) == 0
    told = capfd.readouterr().out.splitlines()
    assert sum(" has left after " in line for line in told) == 4
    assert told[-1].startswith("the job goes on with 1 machines: ")
    run = running.end()
    assert_identical(run, references(*LONG))
    assert [recovery["slots"] for recovery in run.recoveries] == [[3], [2], [1, 2]]
    assert not any(lost for recovery in run.recoveries for lost in recovery["iterations_lost"].values())


@pytest.mark.thorough
def test_without_a_spare_a_machine_stays(
    tmp_path: Path, references: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    running = Running(tmp_path, 0, "--elastic-wait", "600")
    assert main(["drain", "3", "--rdzv-endpoint", running.endpoint, "--timeout", "3"]) == 1
    assert "waits for a spare machine to take its place; if none comes" in capfd.readouterr().out
    assert main(["drain", "7", "--rdzv-endpoint", running.endpoint]) == 2
    assert "there is no machine 7: slots are 0 to 3" in capfd.readouterr().err
    assert main(["drain", "1", "--rdzv-endpoint", running.endpoint, "--rdzv-id", "other"]) == 2
    assert "there is no run 'other'" in capfd.readouterr().err
    run = running.end()
    assert_identical(run, references(*LONG))
    assert not run.recoveries
    assert main(["drain", "1", "--rdzv-endpoint", running.endpoint]) == 2
    assert "no rendezvous store answers" in capfd.readouterr().err
