"""A rendezvous store of one's own, or its host, is gone: it is started again at its address, empty."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_identical,
    kill_processes_of,
    training,
)
from tests.support.waiting import wait_until

ITERATIONS = 10
_END_S = 120.0


class Hosts:
    """Launchers of a run with two machines, and the store that they are given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._processes: list[subprocess.Popen[str]] = []

    def start_store(self) -> subprocess.Popen[str]:
        return self._start(
            "store.txt", [sys.executable, "-m", "swift_ft.cli.store", "--port", str(self.port)]
        )

    def start_launcher(self, name: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", "2", "--rdzv-id", "job"]
        line += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--log-dir", str(self.folder / "logs")]
        line += ["--machine-silence", "10", "--elastic-wait", "100", "--helpers", "0"]
        line += [*training(self.folder, SLOW_UNTIL_TOLD, iterations=ITERATIONS)]
        return self._start(f"{name}.txt", line)

    def _start(self, output: str, line: list[str]) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SWIFT_TEST_FOLDER": str(self.folder),
            "QUICK": str(ITERATIONS),
        }
        with (self.folder / output).open("w") as out:
            process = subprocess.Popen(
                line, stdout=out, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
            )
        self._processes.append(process)
        return process

    def said(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("*.txt")))

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.said(), text)

    def go_on(self) -> None:
        (self.folder / "go").touch()

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        kill_processes_of(self.folder)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def reference(references: Any) -> ClusterRun:
    found: ClusterRun = references("--iterations", str(ITERATIONS), machines=2)
    return found


def test_a_store_of_ones_own(hosts: Hosts, reference: ClusterRun, tmp_path: Path) -> None:
    """Training goes on meanwhile. A warning says how to start it again."""
    store = hosts.start_store()
    hosts.wait_for("rendezvous store at")
    launchers = [hosts.start_launcher(f"launcher{number}") for number in range(2)]
    hosts.wait_for("iteration 2: loss")
    store.kill()
    store.wait(30)
    hosts.wait_for("has not answered for")
    assert (
        f"start it again on 127.0.0.1, empty: python -m swift_ft.cli.store --port {hosts.port}"
        in hosts.said()
    )
    hosts.wait_for("iteration 9: loss")
    hosts.start_store()
    hosts.wait_for("has republished the journal")
    assert [launcher.wait(_END_S) for launcher in launchers] == [0, 0], hosts.said()[-3000:]
    assert_identical(ClusterRun(tmp_path, 0, hosts.said(), {}), reference)
    assert "Traceback" not in hosts.said()


def test_the_host_of_the_store_is_lost_with_its_machine(
    hosts: Hosts, reference: ClusterRun, tmp_path: Path
) -> None:
    """Its launcher is started again, and with it an empty store, in which it takes no run for a new one."""
    store = hosts.start_store()
    hosts.wait_for("rendezvous store at")
    launchers = [hosts.start_launcher(f"launcher{number}") for number in range(2)]
    hosts.wait_for("iteration 3: loss")
    with_last_stage = 1 if "iteration 3: loss" in (tmp_path / "launcher1.txt").read_text() else 0
    survivor, lost = launchers[with_last_stage], launchers[1 - with_last_stage]
    store.kill()
    os.killpg(lost.pid, signal.SIGKILL)
    store.wait(30)
    lost.wait(30)
    again, attempts = hosts.start_launcher("again0"), 1
    while again.wait(_END_S) != 0 and attempts < 3 and survivor.poll() is None:
        assert "start this machine again" in (tmp_path / f"again{attempts - 1}.txt").read_text()
        again, attempts = hosts.start_launcher(f"again{attempts}"), attempts + 1
        hosts.go_on()
    assert [again.wait(_END_S), survivor.wait(_END_S)] == [0, 0], hosts.said()[-5000:]
    said = hosts.said()
    assert_identical(ClusterRun(tmp_path, 0, said, {}), reference)
    assert "has republished the journal" in said
    assert re.search(r"survivors keep their state; worker \d replays", said)
    assert "Traceback" not in said
