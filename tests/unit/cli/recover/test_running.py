"""Verbs that ask something of a running run, before they have asked: a real rendezvous store, no machines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.coordination.journal import Journal, open_journal
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from tests.support.journals import read_now
from tests.support.store_processes import StoreProcess, store_process
from tests.support.waiting import wait_until

HOSTS = ("node1.cluster", "node2.cluster", "node2.cluster", "10.0.0.3", "node4.cluster")
SETUP = ("torch: 2", "--nnodes: 3", "--max-failures: 7", "--resume: True", "--fresh: False")


@pytest.fixture
def service() -> Iterator[StoreProcess]:
    with store_process() as made:
        yield made


def opened(service: StoreProcess, setup: tuple[str, ...] = SETUP) -> Journal:
    """The journal of a run of three machines and two spares, on some hosts."""
    client = partial(connect, service.address)
    journal = open_journal(partial(client, find_run(client, "run")), by="test")
    journal.append(ev.JobOpened(machines=3, setup=setup))
    for number, host in enumerate(HOSTS):
        journal.append(ev.MachineJoined(machine=f"m-{number}.0", address=f"{host}:1234", setup=setup))
    for rank in range(3):
        journal.append(ev.StatusReported(rank=rank, generation=1, iteration=None, stages=(rank,), group=rank))
    return journal


def asked(journal: Journal) -> list[str]:
    """The machines that were asked to leave."""
    events = [entry.event for entry in read_now(journal)]
    return [event.machine for event in events if isinstance(event, ev.DrainRequested)]


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("2", "m-2.0"),
        ("m-4.0", "m-4.0"),
        ("node1", "m-0.0"),
        ("node1.cluster", "m-0.0"),
        ("10.0.0.3", "m-3.0"),
    ],
)
def test_a_machine_is_found_by_its_slot_its_name_and_its_host(
    service: StoreProcess, name: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {*threading.enumerate()}  # of tests before, whose stores are gone
    journal = opened(service)
    endpoint = str(service.address)
    assert main(["drain", name, "--rdzv-endpoint", endpoint, "--timeout", "0.1"]) == 1
    assert f"{machine} has not left within 0.1 s" in capsys.readouterr().err
    assert asked(journal) == [machine]
    left = {thread.name for thread in threading.enumerate() if thread not in others}
    assert "swift-journal" not in left  # it would abort the process


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("node2", "node2 has several machines: choose one of m-1.0, m-2.0"),
        (
            "node9",
            "there is no machine node9: slots are 0 to 2, machines are m-0.0 on node1.cluster, m-1.0 on",
        ),
        ("10", "there is no machine 10: "),
        ("", "there is no machine : "),
    ],
)
def test_no_other_machine_is_asked(
    service: StoreProcess, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = opened(service)
    assert main(["drain", name, "--rdzv-endpoint", str(service.address)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert asked(journal) == []


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ("7", "the job has 5 machines: start 2 more with swift-recover join"),
        ("0", "the job needs at least 1 machines, not 0"),
    ],
)
def test_a_number_of_machines_that_cannot_be(
    service: StoreProcess, machines: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = opened(service)
    assert main(["scale", machines, "--same-workers", "--rdzv-endpoint", str(service.address)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert asked(journal) == []


def test_the_first_that_does_not_leave_ends_it(
    service: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = opened(service)
    endpoint = str(service.address)
    assert main(["scale", "2", "--same-workers", "--rdzv-endpoint", endpoint, "--timeout", "0.1"]) == 1
    assert "m-4.0 has not left within 0.1 s" in capsys.readouterr().err
    assert asked(journal) == ["m-4.0"]


def test_as_many_as_there_are_is_nothing_to_do(
    service: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = opened(service)
    assert main(["scale", "5", "--same-workers", "--rdzv-endpoint", str(service.address)]) == 0
    assert "the job goes on with 5 machines: m-0.0, m-1.0, m-2.0, m-3.0, m-4.0" in capsys.readouterr().out
    assert asked(journal) == []


def test_a_rendezvous_store_that_ends_is_one_line(
    service: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = opened(service)

    def kill_once_asked() -> None:
        wait_until(lambda: asked(journal), "nothing was asked of a machine")
        os.kill(service.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_asked)
    killer.start()
    assert main(["drain", "1", "--rdzv-endpoint", str(service.address)]) == 2
    killer.join()
    (line,) = capsys.readouterr().err.splitlines()
    # While it waits for an answer, or as it asks once more.
    assert line.startswith(
        ("swift-recover: The rendezvous store does not answer", "swift-recover: No rendezvous store answers")
    )


def test_a_flag_that_is_not_common_to_all_machines_is_not_taken_from_a_journal(
    service: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the rendezvous store can write there, and --on-event runs a command."""
    opened(service, (*SETUP, "--on-event: touch /tmp/mine", "--no-python: True"))
    commands: list[list[str]] = []

    class Replaced(BaseException):
        """Another program would run in this process now."""

    def execv(_: str, command: list[str]) -> None:
        commands.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    endpoint = str(service.address)
    with pytest.raises(Replaced):
        main(["join", "--rdzv-endpoint", endpoint, "--", "train.py", "--lr", "0.1"])
    flags = [
        "--nnodes",
        "3",
        "--max-failures",
        "7",
        "--resume",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "run",
    ]
    assert commands[0][3:] == [*flags, "train.py", "--lr", "0.1"]
