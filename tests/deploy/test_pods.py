"""The scripts of the pods, run for real: each pod is a process with a loopback address of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.lib.ports import free_port
from tests.deploy.processes import environment, leaves_nothing, start
from tests.deploy.recipes import scripts
from tests.support.cluster import SLOW_UNTIL_TOLD, processes_of, training
from tests.support.waiting import wait_until

MACHINES = 2


def pod_ip(number: int) -> str:
    """Where the kubelet asks, too."""
    return f"127.0.0.{2 + number}"


class Pods:
    """Two machines and a spare, with the rendezvous store that the Deployment would run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in scripts().items():
            if name in ("start.sh", "drain.sh"):
                (folder / name).write_text(text)
        self._store_port = free_port()
        store = [
            sys.executable,
            "-m",
            "swift_ft.cli.store",
            "--host",
            "127.0.0.1",
            "--port",
            str(self._store_port),
        ]
        self.store = start(store, folder / "store.txt", environment(folder))
        wait_until(
            lambda: "rendezvous store at" in (folder / "store.txt").read_text(), "the rendezvous store"
        )
        self.metrics = {number: free_port() for number in range(MACHINES + 1)}
        script = [*training(folder, SLOW_UNTIL_TOLD, iterations=40), "--checkpoint-every", "20"]
        self._args = ["--heartbeat-timeout", "8", "--log-dir", str(folder / "logs"), *script]

    def env(self, number: int) -> dict[str, str]:
        state = self._folder / f"state{number}"
        state.mkdir(exist_ok=True)
        return environment(
            self._folder,
            MACHINES=str(MACHINES),
            WORKERS="1",
            RUN="run7",
            STAY="yes",
            POD_IP=pod_ip(number),
            STATE=str(state),
            RENDEZVOUS=f"127.0.0.1:{self._store_port}",
            METRICS_PORT=str(self.metrics[number]),
        )

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = ["sh", str(self._folder / "start.sh"), *self._args]
        return start(command, self._folder / f"pod{number}.txt", self.env(number))

    def drain(self, number: int) -> subprocess.CompletedProcess[str]:
        """What the preStop hook does, and its script's last line."""
        command = ["sh", str(self._folder / "drain.sh")]
        return subprocess.run(
            command, env=self.env(number), capture_output=True, text=True, timeout=120, check=False
        )

    def output(self, number: int) -> str:
        return (self._folder / f"pod{number}.txt").read_text()

    def health(self, number: int) -> str:
        """What a probe gets; empty if there is no answer."""
        try:
            with urllib.request.urlopen(
                f"http://{pod_ip(number)}:{self.metrics[number]}/healthz", timeout=10
            ) as answer:
                return str(answer.read().decode()).strip()
        except OSError:
            return ""


@pytest.mark.thorough
def test_a_pod_that_is_evicted_hands_over_and_the_others_stay_until_they_are_deleted(tmp_path: Path) -> None:
    with leaves_nothing(tmp_path):
        pods = Pods(tmp_path)
        running = {number: pods.start(number) for number in range(MACHINES)}
        wait_until(lambda: any("iteration 5:" in pods.output(n) for n in running), "training")
        running[MACHINES] = pods.start(MACHINES)
        assert {pods.health(number) for number in range(MACHINES)} == {"ok"}

        drained = pods.drain(1)
        assert drained.returncode == 0, drained.stderr
        (tmp_path / "go").touch()
        assert " has left after " in drained.stdout.splitlines()[-1]
        assert running.pop(1).wait(60) == 143  # a Job does not take it for done

        wait_until(
            lambda: {pods.health(number) for number in running} == {"ended"}, "the end of the run", 150
        )
        assert all("0 iterations lost" in pods.output(number) for number in running)
        late = pods.drain(0)
        assert late.returncode == 2
        assert late.stderr.startswith("swift-recover: run run7.1-")
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in running.values()] == [143, 143]
        os.kill(pods.store.pid, signal.SIGTERM)
        assert pods.store.wait(60) == 0


def test_a_pod_without_a_spare_leaves_when_it_is_told_to(tmp_path: Path) -> None:
    """SIGTERM reaches the launcher, although the script is the first process of its container."""
    with leaves_nothing(tmp_path):
        pods = Pods(tmp_path)
        process = pods.start(0)
        wait_until(lambda: pods.health(0) == "ok", "the launcher")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        # A machine that has not joined yet has nothing to leave.
        assert re.search(
            r"^swift-run: (this machine left the run: )?stopped by SIGTERM$", pods.output(0), re.MULTILINE
        )
        pods.store.send_signal(signal.SIGTERM)
        assert pods.store.wait(60) == 0
        assert not processes_of(tmp_path)
