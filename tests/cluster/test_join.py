"""``swift-recover join``: a machine for a running job, by hand."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from tests.support.cluster import ClusterRun, assert_identical, training
from tests.support.hosts import Hosts

JOIN = ("swift_ft.cli.recover", "join", "--rdzv-id", "hosts", "--rdzv-endpoint")

ITERATIONS = 200
"""They take longer than the start of a machine."""


@pytest.mark.thorough
def test_a_machine_joins_by_hand(hosts: Hosts, references: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It is given neither the number of machines nor the flags of the job."""
    hosts.script = training(hosts.folder, iterations=ITERATIONS)
    hosts.start("first", 0)
    second = hosts.start("second", 1)
    hosts.wait_for("iteration 10:", "second")
    logs = ("--log-dir", str(hosts.folder / "logs"))
    hosts.start_command("third", *JOIN, hosts.endpoint, "--", *logs, *hosts.command)
    hosts.wait_for("joins hosts.1-", "third")
    assert "--nnodes 2 --nproc-per-node 1" in hosts.output("third")
    second.send_signal(signal.SIGTERM)
    assert main(["join", "--rdzv-endpoint", hosts.endpoint, "--rdzv-id", "hosts"]) == 2
    assert "name the job's script" in capfd.readouterr().err
    assert hosts.end() == {"first": 0, "second": 143, "third": 0}
    assert "a replacement for machine 1" in hosts.output("first")
    reference = references("--iterations", str(ITERATIONS), machines=2)
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)
    assert main(["join", "--rdzv-endpoint", hosts.endpoint, "--", "train.py"]) == 2
    assert "no rendezvous store answers" in capfd.readouterr().err
