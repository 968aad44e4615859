"""Workers that are forked ahead."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.config.exit_codes import EXIT_NOT_STARTED
from swift_ft.coordination.agent_channel import channel_pair
from swift_ft.launch.detection.kernel import process_state
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.processes.worker import WorkerJob
from tests.support.waiting import wait_until


@pytest.fixture
def standby() -> Iterator[Standby]:
    standby = Standby()
    yield standby
    standby.close()


def children(standby: Standby) -> list[int]:
    pids = Path(f"/proc/{standby.pid}/task/{standby.pid}/children").read_text().split()
    return [int(pid) for pid in pids]


def launch(standby: Standby, local_rank: int, *command: str, stderr: str = "") -> int:
    """Returns the pid."""
    job = WorkerJob({}, command[0], command[1:], kind="program")
    ours, theirs = channel_pair()
    with ours:
        standby.launch(job, local_rank=local_rank, stdout="", stderr=stderr, channel=theirs)
    started = standby.receive()
    assert started is not None
    assert started["local_rank"] == local_rank
    return started["started"]


def test_a_job_goes_to_a_worker_that_waits(standby: Standby) -> None:
    standby.prepare(1)
    wait_until(lambda: children(standby), "a worker was forked ahead")
    (waiting,) = children(standby)
    assert launch(standby, 3, "sh", "-c", "exit 7") == waiting
    assert standby.receive() == {"ended": waiting, "status": 7}
    again = launch(standby, 4, "sh", "-c", "exit 8")
    assert again != waiting
    assert standby.receive() == {"ended": again, "status": 8}


def test_a_worker_that_waits_may_end(standby: Standby) -> None:
    """A job is not given to it."""
    standby.prepare(1)
    wait_until(lambda: children(standby), "a worker was forked ahead")
    (waiting,) = children(standby)
    os.kill(waiting, 9)
    assert standby.receive() == {"ended": waiting, "status": -9}
    started = launch(standby, 0, "sh", "-c", "exit 7")
    assert started != waiting
    assert standby.receive() == {"ended": started, "status": 7}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_program_that_cannot_be_run_has_failed(standby: Standby, tmp_path: Path, ahead: int) -> None:
    """It has not ended well, and neither has its standby, which serves on."""
    standby.prepare(ahead)
    program = tmp_path / "program"
    program.write_text("#!/no/such/shell")
    program.chmod(0o700)
    started = launch(standby, 0, str(program))
    assert standby.receive() == {"ended": started, "status": EXIT_NOT_STARTED}
    again = launch(standby, 0, "sh", "-c", "exit 7")
    assert standby.receive() == {"ended": again, "status": 7}


def test_a_worker_whose_output_has_no_place_has_failed(standby: Standby, tmp_path: Path) -> None:
    started = launch(standby, 0, "true", stderr=str(tmp_path / "no folder" / "stderr"))
    assert standby.receive() == {"ended": started, "status": EXIT_NOT_STARTED}


def test_the_stop_of_a_worker_is_told_and_then_its_end(standby: Standby) -> None:
    started = launch(standby, 0, "sleep", "600")
    os.kill(started, signal.SIGSTOP)
    assert standby.receive() == {"stopped": started}
    os.kill(started, signal.SIGCONT)
    os.kill(started, 9)
    assert standby.receive() == {"ended": started, "status": -9}


def test_no_worker_waits_longer_than_its_standby_lives() -> None:
    standby = Standby()
    standby.prepare(2)
    wait_until(lambda: len(children(standby)) == 2, "two workers were forked ahead")
    waiting = children(standby)
    os.kill(standby.pid, 9)
    standby.close()
    wait_until(lambda: all(process_state(pid) in "XZ" for pid in waiting), "they ended")


def test_garbage_that_needs_this_process_ends_in_it(tmp_path: Path) -> None:
    """A group of torch's waits for its threads as it is freed. In a fork there are none."""

    class Group:
        def __init__(self) -> None:
            self.itself = self  # only a collection of garbage frees it

        def __del__(self) -> None:
            with (tmp_path / "freed by").open("a") as file:
                file.write(f"{os.getpid()} ")

    gc.disable()
    try:
        Group()
        standby = Standby()
        standby.prepare(1)  # answered by a standby that has made ready
        wait_until(lambda: len(children(standby)) == 1, "a worker was forked ahead")
        standby.close()
    finally:
        gc.enable()
    assert (tmp_path / "freed by").read_text() == f"{os.getpid()} "


def test_one_that_stands_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the end of its agent for ever."""
    monkeypatch.setattr("swift_ft.launch.processes.standby._ENDS_S", 0.2)
    standby = Standby()
    os.kill(standby.pid, signal.SIGSTOP)
    standby.close()
    assert not Path(f"/proc/{standby.pid}").exists()
