"""``swift-run --status``: a real view of a real journal in a real rendezvous store."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from swift_ft.cli.run import parser
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.progress import progress_key
from swift_ft.coordination.relay.notes import Notes, write_notes
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from tests.support.journals import read_now
from tests.support.store_processes import StoreProcess, store_process

_DEADLINE_S = 120.0


class Job:
    """A run of two machines, whose journal is written here."""

    def __init__(self, store: StoreProcess) -> None:
        client = partial(connect, store.address)
        self.endpoint = str(store.address)
        self.run_id = find_run(client, "job7")
        self.journal = open_journal(partial(client, self.run_id), by="test")
        self.store = client(self.run_id)
        self.append(
            *(ev.JobOpened(machines=2, max_failures=9) for _ in range(2)),  # each launcher opens it
            *(ev.MachineJoined(machine=name) for name in "abc"),
            *(ev.StatusReported(rank=r, generation=1, iteration=None, steps=60) for r in range(2)),
            *(ev.WorkerReady(rank=r, generation=1) for r in range(2)),
            ev.MachineLost(machine="b", reason="its agent's connection ended"),
        )
        notes = Notes()
        for rank in range(2):
            notes.put(rank, {progress_key(rank): {"iteration": 47, "mode": "live"}})
        write_notes(self.store, notes, range(2), machines=2)

    def append(self, *events: ev.Event) -> None:
        self.journal.append(*events)

    def end(self) -> None:
        self.append(ev.JobClosed(reason="stopped by SIGTERM", exit_code=143))


@pytest.fixture
def service() -> Iterator[StoreProcess]:
    """A rendezvous store in a process of its own."""
    with store_process() as service:
        yield service


@pytest.fixture
def job(service: StoreProcess) -> Job:
    """A run that has just lost a machine."""
    return Job(service)


def view(
    endpoint: str, name: str = "job7", *, ci: str = "", stdout: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swift_ft.cli.run", "--status", name, "--rdzv-endpoint", endpoint]
    env = {**os.environ, "CI": ci, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


def until(process: subprocess.Popen[str], words: str) -> list[str]:
    """Reads lines up to the first one with these words."""
    assert process.stdout is not None
    guard = threading.Timer(_DEADLINE_S, process.kill)
    guard.start()
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if words in line:
            guard.cancel()
            return lines
    raise AssertionError(f"{words!r} is missing in {lines}")


def test_a_run_is_found_by_its_name_and_its_end_ends_the_view(job: Job) -> None:
    process = view(job.endpoint)
    told = [line.partition(" s  ")[2] for line in until(process, "generation 2")]
    opened = "a run on 2 machines, 1 worker on each"
    assert (told[0], told.count(opened)) == (opened, 1)
    assert "machine 1 is lost: its agent's connection ended" in told
    job.end()
    rest, errors = process.communicate(timeout=_DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert rest.endswith("the run ends: stopped by SIGTERM\n")


def test_ctrl_c_leaves_the_run_alone(job: Job) -> None:
    process = view(job.endpoint)
    until(process, "generation 2")
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=_DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert rest.splitlines()[-1] == f"the view of {job.run_id} ends; the run goes on"
    assert len([*read_now(job.journal)]) == 10, "the view wrote into the journal"


def test_ctrl_c_ends_the_view_of_a_frozen_store(job: Job, service: StoreProcess) -> None:
    process = view(job.endpoint)
    until(process, "generation 2")
    os.kill(service.pid, signal.SIGSTOP)
    try:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 0
    finally:
        os.kill(service.pid, signal.SIGCONT)


def test_a_store_that_dies_ends_the_view(job: Job, service: StoreProcess) -> None:
    process = view(job.endpoint)
    until(process, "generation 2")
    os.kill(service.pid, signal.SIGKILL)
    rest, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0
    assert (
        rest == f"the rendezvous store at {job.endpoint} is gone: the run has ended, or that host is lost\n"
    )


def test_in_ci_only_losses_and_the_end_are_told(job: Job) -> None:
    job.end()
    output, _ = view(job.endpoint, ci="true").communicate(timeout=_DEADLINE_S)
    assert [line.partition(" s  ")[2] for line in output.splitlines()] == [
        "machine 1 is lost: its agent's connection ended",
        "generation 2: a replacement for machine 1",
        "the run ends: stopped by SIGTERM",
    ]


def test_a_terminal_gets_a_bar_per_machine(job: Job) -> None:
    ours, theirs = pty.openpty()
    process = view(job.endpoint, stdout=theirs)
    os.close(theirs)
    seen = b""
    guard = threading.Timer(_DEADLINE_S, process.kill)
    guard.start()
    try:
        while b"47/60" not in seen:
            seen += os.read(ours, 4096)
        job.end()
        while chunk := _read(ours):
            seen += chunk
        _, errors = process.communicate(timeout=_DEADLINE_S)
        assert (process.returncode, errors) == (0, "")
    finally:
        guard.cancel()
        os.close(ours)
    assert b"machine 1" in seen
    assert b"generation 2, ended" in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize(
    ("name", "endpoint", "words"),
    [
        ("job8", None, "There is no run 'job8' at "),
        ("job7", "127.0.0.1:1", "No rendezvous store answers at 127.0.0.1:1"),
        ("job7", "127.0.0.1:x", "'127.0.0.1:x' is not an endpoint: write host:port."),
        ("job7", "", "--status needs the --rdzv-endpoint"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(job: Job, name: str, endpoint: str | None, words: str) -> None:
    process = view(job.endpoint if endpoint is None else endpoint, name)
    output, errors = process.communicate(timeout=_DEADLINE_S)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(f"swift-run: {words}")
    assert errors.count("\n") == 1


def test_a_scripts_own_status_flag_is_its_own() -> None:
    args = parser().parse_args(["--nnodes", "2", "train.py", "--status", "verbose"])
    assert (args.status, args.training_script_args) == (None, ["--status", "verbose"])
    with pytest.raises(SystemExit):
        parser().parse_args(["--nnodes", "2"])
