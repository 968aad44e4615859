"""Signals: a worker's are its failure, a launcher's take its machine out of the run, and Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from swift_ft.launch.signals import handles
from tests.support.cluster import (
    EXAMPLES,
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_identical,
    processes_of,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

SENDS_SIGNALS = Path(__file__).parent / "scripts" / "sends_signals.py"


def test_signals_to_a_worker_and_to_an_agent(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines are replaced, and nothing else happens."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    orders = [
        {"rank": 1, "iteration": 4, "signal": "SIGINT", "to": "worker"},
        {"rank": 2, "iteration": 6, "signal": "SIGTERM", "to": "agent"},
    ]
    monkeypatch.setenv("SIGNALS", json.dumps(orders))
    run = run_cluster(tmp_path, script=training(tmp_path, SENDS_SIGNALS))
    assert_identical(run, references())
    assert [recovery["reasons"] for recovery in run.recoveries] == [
        ["worker 1 was killed by SIGINT"],
        ["stopped by SIGTERM"],
    ]
    assert "Traceback" not in run.output
    assert "KeyboardInterrupt" not in run.output


@pytest.mark.thorough
def test_a_stopped_launcher_hands_over_and_a_frozen_one_comes_back(hosts: Hosts, references: Any) -> None:
    first, second = hosts.start("first", 0), hosts.start("second", 1)
    hosts.wait_for("iteration 10:", "second")
    hosts.start("third", 1)
    second.send_signal(signal.SIGTERM)
    hosts.wait_for("all are live, and go on with", "first")
    assert second.wait(timeout=60) == 128 + signal.SIGTERM
    assert hosts.output("second").endswith("\nswift-run: this machine left the run: stopped by SIGTERM\n")
    hosts.start("fourth", 0)
    os.killpg(first.pid, signal.SIGSTOP)
    hosts.wait_for("] machine 0 is lost: ", "third")
    os.killpg(first.pid, signal.SIGCONT)
    assert hosts.end() == {"first": 0, "second": 143, "third": 0, "fourth": 0}
    assert "] machine 1 is lost: stopped by SIGTERM" in hosts.output("first")
    reference = references("--iterations", "60", machines=2)
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)


def test_ctrl_c_ends_the_run_on_all_hosts(hosts: Hosts) -> None:
    """In a terminal the whole process group gets the signal, the workers among it."""
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    os.killpg(hosts.processes["first"].pid, signal.SIGINT)
    assert hosts.end() == {"first": 130, "second": 130}
    for name in ("first", "second"):
        assert hosts.output(name).splitlines()[-1] == "swift-run: stopped by SIGINT"
        assert hosts.output(name).count("SIGINT") == 1


def test_another_ctrl_c_on_all_hosts_leaves_no_store(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers end at once, while their workers do not end, and say nothing to the store."""
    monkeypatch.setenv("EXAMPLE", "outlives_signals")
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=60)
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    viewer = ["--status", "hosts", "--rdzv-endpoint", hosts.endpoint]
    status = hosts.start_command("status", "swift_ft.cli.run", *viewer)
    hosts.wait_for("all workers start", "status")
    hosts.processes["first"].send_signal(signal.SIGINT)
    assert status.wait(60) == 0  # the journal says that the run has ended
    for name in ("first", "second"):
        hosts.processes[name].send_signal(signal.SIGINT)
    assert hosts.end() == {"first": 130, "second": 130, "status": 0}


@pytest.mark.thorough
def test_the_last_stopped_launcher_ends_the_run(hosts: Hosts) -> None:
    """A scheduler stops all of them: no store is left that waits for more machines."""
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    for process in hosts.processes.values():
        process.send_signal(signal.SIGTERM)
    assert hosts.end() == {"first": 143, "second": 143}


def handling(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, **handles: dict[str, list[int]]) -> None:
    """The workers' own handlers: see ``scripts/handles_signals.py``."""
    monkeypatch.setenv("EXAMPLE", "handles_signals")
    monkeypatch.setenv("HANDLES", json.dumps(handles))
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=60)


def start_on_one_host(hosts: Hosts, *flags: str) -> Popen[str]:
    shape = ["--standalone", "--machines", "2", "--log-dir", str(hosts.folder / "logs")]
    launcher = hosts.start_command("all", hosts.module, *shape, *flags, *hosts.command)
    hosts.wait_for("iteration 2:", "all")
    return launcher


def test_a_signal_for_workers_reaches_those_that_handle_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends nobody: neither who passes it on, nor who ignores it."""
    handling(hosts, monkeypatch, notes={"SIGUSR1": [0]})
    launcher = start_on_one_host(hosts)
    launcher.send_signal(signal.SIGUSR1)
    hosts.wait_for("SIGUSR1 is ignored: the script of worker 1 does not handle it\n", "all")
    wait_until((hosts.folder / "SIGUSR1-0").exists, "the handler of worker 0")
    workers = {(hosts.folder / f"worker-{rank}").read_text() for rank in range(2)}
    others = {line.partition(":")[0] for line in processes_of(hosts.folder)} - workers
    assert len(others) >= 6  # the launcher, its console and its store, two agents, two standbys
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for pid in others:
            os.kill(int(pid), number)
    hosts.wait_for("SIGUSR2 is ignored: the script of worker 0 does not handle it\n", "all")
    (hosts.folder / "go").touch()
    assert hosts.end() == {"all": 0}
    assert "is lost" not in hosts.output("all")


def test_the_signals_to_handle_are_the_users(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get the very signal that stops the launcher. One that the shell ignores stays ignored."""
    handling(hosts, monkeypatch, ends={"SIGUSR1": [0, 1]})
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        launcher = start_on_one_host(hosts, "--signals-to-handle", "SIGTERM, SIGUSR1")
    finally:
        signal.signal(signal.SIGHUP, before)
    os.killpg(launcher.pid, signal.SIGHUP)
    for rank in range(2):
        os.kill(int((hosts.folder / f"worker-{rank}").read_text()), signal.SIGHUP)
    launcher.send_signal(signal.SIGUSR1)
    assert hosts.end() == {"all": 128 + signal.SIGUSR1}
    assert {path.name for path in hosts.folder.glob("SIG*")} == {"SIGUSR1-0", "SIGUSR1-1"}
    assert hosts.output("all").splitlines()[-1] == "swift-run: stopped by SIGUSR1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_torch_is_imported_ends_a_launcher_with_a_line(number: int, hosts: Hosts) -> None:
    launcher = hosts.start("first", 0)
    wait_until(lambda: handles(launcher.pid, signal.SIGUSR1), "the first handlers")
    launcher.send_signal(number)
    assert hosts.end() == {"first": 128 + number}
    assert hosts.output("first") == f"swift-run: stopped by {signal.Signals(number).name}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_store_is_waited_for_is_said_in_a_line(number: int, hosts: Hosts) -> None:
    """Nothing answers where the store should be: torch's client waits in C++, where no handler runs."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        hosts.endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        launcher = hosts.start("second", 1)
        silent.settimeout(120)
        with contextlib.closing(silent.accept()[0]):
            launcher.send_signal(number)
            assert hosts.end() == {"second": 128 + number}
    assert hosts.output("second") == f"swift-run: stopped by {signal.Signals(number).name}\n"


@pytest.mark.parametrize("names", ["SIGTERM,SIGURS1", "SIGKILL"])
def test_signals_that_cannot_be_handled_are_named(names: str, hosts: Hosts) -> None:
    hosts.start("first", 0, "--signals-to-handle", names)
    assert hosts.end() == {"first": 2}
    (line,) = hosts.output("first").splitlines()
    assert line.startswith("swift-run: --signals-to-handle: ")
    assert names.rpartition(",")[2] in line


def test_a_signal_to_all_processes_at_once_is_a_stop(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler sends it: the workers get it before their agents, and from these once more."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    handling(hosts, monkeypatch, ends={"SIGTERM": [0, 1]})
    launcher = start_on_one_host(hosts)
    for line in processes_of(hosts.folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.partition(":")[0]), signal.SIGTERM)
    assert launcher.wait(60) == 143
    assert hosts.end(interrupted_at_exit=True) == {"all": 143}
    assert hosts.output("all").splitlines()[-1] == "swift-run: stopped by SIGTERM"
    assert (
        "(cause: scheduler): stopped by SIGTERM (this launcher runs in Slurm job 4711: see sacct -j 4711)"
        in hosts.output("all")
    )


@pytest.mark.thorough
def test_scripts_that_end_at_a_signal_on_other_hosts_are_no_early_end(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals all processes, and one launcher has not heard of it yet."""
    handling(hosts, monkeypatch, ends={"SIGTERM": [0, 1]})
    for node, name in enumerate(("first", "second")):
        hosts.start(name, node)
    hosts.wait_for("iteration 2:", "second")
    hosts.processes["first"].send_signal(signal.SIGTERM)
    os.kill(int((hosts.folder / "worker-1").read_text()), signal.SIGTERM)
    assert hosts.end(interrupted_at_exit=True) == {"first": 143, "second": 143}
    assert {path.name for path in hosts.folder.glob("SIG*")} == {"SIGTERM-0", "SIGTERM-1"}
    assert hosts.output("second").splitlines()[-1] == "swift-run: stopped by SIGTERM"
