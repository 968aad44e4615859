"""A run on hosts that have nothing but IPv6."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from swift_ft.network.addresses import is_this_host
from tests.support.cluster import kill_processes_of
from tests.support.hosts import Hosts

SPEAKS_IPV6 = socket.has_ipv6 and is_this_host("::1")


@pytest.mark.skipif(not SPEAKS_IPV6, reason="this host has no IPv6")
def test_a_loss_is_repaired_over_ipv6(tmp_path: Path) -> None:
    """The first launcher starts the store, a machine is lost, and a spare takes its slot."""
    hosts = Hosts(tmp_path, 8, "[::1]")
    kill = "kill machine=1 iteration=5 point=forward microbatch=3 committed=3"
    try:
        for node, name in enumerate(("first", "second")):
            more = ["--events-out", str(tmp_path / "events.json")] if not node else []
            hosts.start(name, node, "--elastic-wait", "100", "--inject", kill, *more)
        hosts.wait_for("iteration 0:", "first", "second")  # a spare that comes before them takes a slot
        spare = hosts.start_command("spare", *_spare(hosts, kill))
        assert hosts.processes["first"].wait(timeout=120) == 0, hosts.output("first")
        assert spare.wait(timeout=60) == 0, hosts.output("spare")
    finally:
        kill_processes_of(tmp_path)
        for process in hosts.processes.values():
            process.wait(timeout=30)
    report = json.loads((tmp_path / "events.json").read_text())
    assert [recovery["mode"] for recovery in report["recoveries"]] == ["replay"]
    joined = [event["address"] for event in report["events"] if event["event"] == "MachineJoined"]
    assert len(joined) >= 3
    assert all(re.fullmatch(r"\[::1\]:\d+", address) for address in joined)


def _spare(hosts: Hosts, kill: str) -> list[str]:
    flags = ["--nnodes", "2", "--rdzv-endpoint", hosts.endpoint, "--rdzv-id", "hosts"]
    flags += ["--heartbeat-timeout", "6", "--elastic-wait", "100"]
    flags += ["--log-dir", str(hosts.folder / "logs"), "--inject", kill]
    return [hosts.module, *flags, *hosts.command]
