"""What a worker leaves behind, as its standby sees it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.coordination.agent_channel import channel_pair
from swift_ft.faults import strikes
from swift_ft.launch.detection.kernel import process_state
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.processes.worker import WorkerJob
from tests.support.waiting import wait_until

LEAVES_ONE = "setsid sleep 60 & echo $! > {place}"


@pytest.fixture
def standby() -> Iterator[Standby]:
    standby = Standby()
    yield standby
    standby.close()


def left_behind(standby: Standby, place: Path, command: str) -> int:
    """Run a worker to its end. Returns the process that it has started."""
    job = WorkerJob({}, "bash", ("-c", command.format(place=place)), kind="program")
    ours, theirs = channel_pair()
    with ours:
        standby.launch(job, local_rank=0, stdout="", stderr="", channel=theirs)
    assert "started" in (standby.receive() or {})
    assert "ended" in (standby.receive() or {})
    return int(place.read_text())


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("X", "Z")


def test_a_dead_worker_leaves_nothing(standby: Standby, tmp_path: Path) -> None:
    """It is gone when the agent hears of the end."""
    pid = left_behind(standby, tmp_path / "pid", LEAVES_ONE + "; kill -9 $$")
    assert not is_alive(pid)


def test_what_a_finished_script_leaves_goes_on(standby: Standby, tmp_path: Path) -> None:
    """As under torchrun, unless the agent has stopped the worker, or is itself dead."""
    pid = left_behind(standby, tmp_path / "pid", LEAVES_ONE)
    assert is_alive(pid)
    standby.kill_strays()
    wait_until(lambda: not is_alive(pid), "the agent has asked for its end")
    pid = left_behind(standby, tmp_path / "pid", LEAVES_ONE)
    standby.close()
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_who_cleans_up_after_a_dead_worker_may_do_so(standby: Standby, tmp_path: Path) -> None:
    """The tracker of multiprocessing removes its shared memory, and ends by itself."""
    tracker = "(exec -a multiprocessing.resource_tracker sleep 60) & echo $! > {place}"
    is_named = "until grep -q tracker /proc/$(cat {place})/cmdline; do :; done"
    pid = left_behind(standby, tmp_path / "pid", f"{tracker}; {is_named}; kill -9 $$")
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


VANISHES = """
import os, pathlib, sys
from swift_ft.faults.strikes import vanish

vanish(pathlib.Path(sys.argv[1]), 3.0)
os.kill(os.getpid(), 9)
"""


def test_a_store_that_has_vanished_comes_back_though_its_worker_is_lost(
    standby: Standby, tmp_path: Path
) -> None:
    """Or the fault would last for ever, and whatever waits for the store with it."""
    store = tmp_path / "store"
    store.mkdir()
    job = WorkerJob({}, sys.executable, ("-c", VANISHES, str(store)), kind="program")
    ours, theirs = channel_pair()
    with ours:
        standby.launch(job, local_rank=0, stdout="", stderr="", channel=theirs)
    assert "started" in (standby.receive() or {})
    assert (standby.receive() or {})["status"] == -signal.SIGKILL
    assert not store.exists()
    (back,) = children(standby)
    assert back not in strikes.below(standby.pid)
    wait_until(store.exists, "the store is back")


CUTS = """
import os
from swift_ft.host.networks import Networks

Networks(1, os.getpid(), 2).cut(0, 3.0, sends=True, hears=False, peer=1)
os.kill(os.getpid(), 9)
"""


def test_a_network_that_is_cut_is_mended_though_its_worker_is_lost(standby: Standby, tmp_path: Path) -> None:
    """By a program that stands in for ``ip``. Nor is it stopped with its machine."""
    told, ip = tmp_path / "told", tmp_path / "ip"
    ip.write_text(f'#!/bin/sh\necho "$*" >> {told}\n')
    ip.chmod(0o755)
    job = WorkerJob(
        {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, sys.executable, ("-c", CUTS), kind="program"
    )
    ours, theirs = channel_pair()
    with ours:
        standby.launch(job, local_rank=0, stdout="", stderr="", channel=theirs)
    assert "started" in (standby.receive() or {})
    assert (standby.receive() or {})["status"] == -signal.SIGKILL
    (mender,) = children(standby)
    assert mender not in strikes.below(standby.pid)
    wait_until(lambda: len(told.read_text().splitlines()) == 2, "the network is mended")
    cut, mended = told.read_text().splitlines()
    assert "lladdr 02:53:57:ff:ff:ff" in cut
    assert "lladdr 02:53:57:01:00:02" in mended


def children(standby: Standby) -> list[int]:
    pids = Path(f"/proc/{standby.pid}/task/{standby.pid}/children").read_text().split()
    return [int(pid) for pid in pids]
