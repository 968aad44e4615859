"""A network that is gone without a word: every machine notices, says so, and ends by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from tests.support.cluster import ClusterRun, assert_identical, training
from tests.support.network import Host, cut, two_hosts
from tests.support.waiting import wait_until

_DEADLINE_S = 90


def start(host: Host, folder: Path, rendezvous: str, slot: int) -> subprocess.Popen[str]:
    """One machine of two. It trains for as long as the network lives."""
    launcher = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", "2:2", "--rdzv-id", "cut"]
    launcher += ["--rdzv-endpoint", f"{rendezvous}:29444", "--local-addr", host.address]
    launcher += ["--node-rank", str(slot), "--log-dir", str(folder / "logs")]
    launcher += ["--heartbeat-timeout", "2", "--rendezvous-timeout", "5", "--join-timeout", "15"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.interface}
    return subprocess.Popen(
        host.command(*launcher, *training(folder, iterations=100_000)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )


def test_two_hosts_lose_sight_of_each_other(tmp_path: Path) -> None:
    """The one with the rendezvous store waits for another machine. The other one is cut off for good."""
    with two_hosts() as (first, second):
        machines = [start(host, tmp_path, first.address, slot) for slot, host in enumerate((first, second))]
        try:
            assert machines[1].stdout is not None
            for line in machines[1].stdout:
                if "iteration 3:" in line:
                    break
            cut(second)
            with_store, cut_off = (machine.communicate(timeout=_DEADLINE_S)[0] for machine in machines)
        finally:
            for machine in machines:
                machine.kill()
    assert [machine.returncode for machine in machines] == [1, 1]
    assert "no machine joined for slots [1] within 15 s" in with_store
    assert f"the rendezvous store at {first.address}:29444 has not answered for" in cut_off
    last = cut_off.splitlines()[-1]
    assert last.startswith("swift-run: The rendezvous store does not answer"), cut_off
    assert "--resume" in last


@pytest.mark.thorough
def test_a_machine_that_nobody_reaches(tmp_path: Path, references: Any) -> None:
    """It reaches all others. Without a pause it would join and be lost until the job gives up."""
    port = free_port()

    def machine(address: str, name: str) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", "4", "--rdzv-id", "one-way"]
        launcher += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", address]
        launcher += ["--heartbeat-timeout", "2", "--log-dir", str(tmp_path / "logs")]
        launcher += ["--events-out", str(tmp_path / f"{name}.json"), *training(tmp_path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{name}.txt").open("w") as console:
            return subprocess.Popen(launcher, stdout=console, stderr=subprocess.STDOUT, text=True, env=env)

    machines = [machine("127.0.0.1", f"good{i}") for i in range(3)]
    machines.append(machine("192.0.2.1", "unreachable"))  # an address that belongs to nobody (RFC 5737)
    try:
        wait_until(lambda: "stays away for 10 s" in (tmp_path / "unreachable.txt").read_text(), "the pause")
        machines.append(machine("127.0.0.1", "good3"))
        codes = [one.wait(_DEADLINE_S) for one in machines]
    finally:
        for one in machines:
            one.kill()
    output = "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert codes == [0] * 5, output[-3000:]
    report = json.loads((tmp_path / "good0.json").read_text())
    assert_identical(ClusterRun(tmp_path, 0, output, report), references())
    lost = [event for event in report["events"] if event["event"] == "MachineLost"]
    assert 2 <= len(lost) <= 4, lost  # once more after the pause, or twice
    assert all("cannot be reached" in event["reason"] for event in lost)
