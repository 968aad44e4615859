"""All machines of a run are gone, and its store is not: the same commands with ``--resume`` continue."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.cluster import kill_processes_of
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

STORE = "swift_ft.cli.store"
ITERATIONS, COMMITTED = 16, 6
OVER = "none of its machines is there any more"


def kill_all(hosts: Hosts, *names: str) -> None:
    """SIGKILL for launchers and all that they started, but for the store, once a checkpoint is committed."""
    marker = re.compile(r"iteration (\d+):")

    def iteration() -> int:
        found = marker.findall("".join(hosts.output(name) for name in names))
        return max(map(int, found), default=0)

    wait_until(lambda: iteration() > COMMITTED, lambda: "".join(map(hosts.output, names)))
    for name in names:
        process = hosts.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("own_store", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_same_commands_resume(own_store: bool, tmp_path: Path) -> None:
    """The store is a service of its own, or was started by a launcher and outlives it."""
    hosts = Hosts(tmp_path, ITERATIONS)
    try:
        resume(hosts, own_store=own_store)
    finally:
        kill_processes_of(tmp_path)
        for process in hosts.processes.values():
            process.wait(timeout=30)


def resume(hosts: Hosts, *, own_store: bool) -> None:
    if own_store:
        hosts.start_command("store", STORE, "--port", hosts.endpoint.rpartition(":")[2])
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    kill_all(hosts, "first", "second")
    for node, name in enumerate(("third", "fourth")):
        hosts.start(name, node, "--resume")
    for name in ("third", "fourth"):
        assert hosts.processes[name].wait(timeout=120) == 0, hosts.output(name)
        assert OVER in hosts.output("third") + hosts.output("fourth")
    assert "iteration 0:" not in hosts.output("third") + hosts.output("fourth")
    if not own_store:
        hosts.end()
