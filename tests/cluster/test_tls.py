"""A whole run over TLS with certificates of the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from swift_ft.launch.detection.sentinel import WATCH
from swift_ft.network import Certificates, JobSecret, RefusedError, connect
from tests.cluster.test_strangers import listening_ports
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.strangers import issue, new_authority

TOKEN = "a token that only this run's machines know"
LONG = 30
"""Iterations of a run that waits for a test."""


def flags_of(files: Certificates) -> list[str]:
    return ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca]


def let_in(ports: Iterable[int], secret: JobSecret) -> int:
    """How many of these ports take somebody for a member."""
    count = 0
    for port in ports:
        try:
            connect(f"127.0.0.1:{port}", secret, WATCH, timeout_s=2.0).close()
        except (RefusedError, OSError):
            continue
        count += 1
    return count


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return new_authority(tmp_path)


def test_a_loss_is_repaired_over_tls(tmp_path: Path, authority: Path, references: Any) -> None:
    """Log segments reach the replacement from the workers that wrote them."""
    fault = "kill machine=1 iteration=5 point=forward microbatch=3"
    run = run_cluster(tmp_path / "run", inject=fault, flags=flags_of(issue(authority, "machine")))
    assert_identical(run, references())
    assert_clean(run)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"], run.output[-3000:]
    # Who is killed may be in the middle of a handshake. That is no other refusal.
    refused = [line for line in run.output.splitlines() if "refused a connection" in line]
    assert all("it ended the connection" in line for line in refused), refused


def test_a_machine_with_a_certificate_of_another_authority_is_refused_and_the_run_goes_on(
    hosts: Hosts, authority: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could reach no machine, and would take them all for dead."""
    monkeypatch.setenv("SWIFT_FT_TOKEN", TOKEN)
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=LONG)
    for node, name in enumerate(("first", "second", "third")):  # the third one is a spare
        hosts.start(name, node, *flags_of(issue(authority, name)))
    hosts.wait_for("iteration 3:", "first", "second", "third")
    ours, theirs = issue(authority, "ours"), issue(new_authority(hosts.folder, "another"), "theirs")
    ports = set(listening_ports())
    assert let_in(ports, JobSecret.of_token(TOKEN, ours)) == 3  # the agents
    assert let_in(ports, JobSecret.of_token(TOKEN)) == let_in(ports, JobSecret.of_token(TOKEN, theirs)) == 0

    assert hosts.start("foreign", 3, *flags_of(theirs)).wait(60) == EXIT_KEPT_OUT
    told = [line for line in hosts.output("foreign").splitlines() if line.startswith("swift-run: ")]
    assert len(told) == 1, told
    assert "the authorities (--tls-ca)" in told[0]
    del hosts.processes["foreign"]

    victim = next(name for name in hosts.processes if "iteration 3:" in hosts.output(name))
    others = [name for name in hosts.processes if name != victim]
    killed = hosts.processes.pop(victim)
    killed.kill()
    killed.wait()
    hosts.wait_for("all are live", *others)
    (hosts.folder / "go").touch()
    assert hosts.end() == dict.fromkeys(others, 0)
    assert not any("cannot be reached" in hosts.output(name) for name in others)
    reference = references("--iterations", str(LONG), machines=2)
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)
