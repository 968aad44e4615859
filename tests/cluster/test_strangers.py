"""Strangers at every port of a running job: nothing changes but lines of the log."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.ports import free_port
from examples.commands import descendants
from swift_ft.launch.detection.sentinel import WATCH
from swift_ft.network import JobSecret, connect
from tests.support.cluster import SLOW_UNTIL_TOLD, assert_identical, run_cluster, training
from tests.support.strangers import Wire, stranger

TOKEN = "a token that only this run's machines know"
LONGER = "--iterations=40"
PATIENT = ["--machine-silence", "10"]
"""On a busy host, a machine that waits for a core shall not look like one that is disturbed."""

ENOUGH_ROUNDS, MOST_ROUNDS = 2, 150
AT_ONCE = 40
"""Half-open connections that are held."""

PAUSE_S = 0.05
_LISTENING = "0A"


@dataclass
class Usage:
    """What a process has used: at first, and at most."""

    first: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def note(self, now: dict[str, int]) -> None:
        if not now:  # it has ended
            return
        self.first = self.first or now
        self.most = {name: max(value, self.most.get(name, 0)) for name, value in now.items()}


class Attack:
    """Attacks all ports of the run that this process has started, in a thread, for a bounded time.

    Args:
        told: the file that tells the run to go on: every port was attacked, and once more.
    """

    def __init__(self, told: Path) -> None:
        self._told = told
        self.refused = 0
        self.rounds = 0
        self.agents: dict[int, Usage] = {}
        self.ports: set[int] = set()
        self._held: list[socket.socket] = []
        self._recorded: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        for line in self._held:
            line.close()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S) and self.rounds < MOST_ROUNDS:
            listening = listening_ports()
            self.ports |= listening.keys()
            for port, pid in listening.items():
                self._attack(port)
                if self._recorded[port]:  # an agent
                    self.agents.setdefault(pid, Usage()).note(usage_of(pid))
            self.rounds += bool(listening)
            if self.rounds == ENOUGH_ROUNDS:
                self._told.touch()

    def _attack(self, port: int) -> None:
        address = f"127.0.0.1:{port}"
        if port not in self._recorded:
            self._recorded[port] = record(address)
        kinds = (os.urandom(300), b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x10")
        for first in (kinds[self.rounds % len(kinds)], self._recorded[port]):
            with contextlib.suppress(OSError), stranger(address, first) as line:
                line.settimeout(0.5 if self._recorded[port] else 0.02)
                self.refused += is_ended(line)
        with contextlib.suppress(OSError):
            self._held.append(stranger(address))
        while len(self._held) > AT_ONCE:
            self._held.pop(0).close()


def is_ended(line: socket.socket) -> bool:
    """Whether the other side ends a connection, perhaps after a few bytes, before the socket's timeout."""
    try:
        while line.recv(4096):
            continue
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def record(address: str) -> bytes:
    """What a member says to an agent's port, as somebody on the wire has recorded it; empty elsewhere."""
    with Wire(address) as wire, contextlib.suppress(OSError):
        channel = connect(wire.address, JobSecret.of_token(TOKEN), WATCH, timeout_s=0.5)
        channel.send({"beat": 1})
        channel.receive(2.0)
        channel.close()
        return bytes(wire.upward)
    return b""


def listening_ports() -> dict[int, int]:
    """The ports at which this process's descendants listen, and their processes."""
    owners: dict[str, int] = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners.setdefault(str(entry.readlink()), pid)
    return {
        port: owners[f"socket:[{inode}]"] for port, inode in _listening() if f"socket:[{inode}]" in owners
    }


def _listening() -> Iterator[tuple[int, str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            facts = line.split()
            if facts[3] == _LISTENING:
                yield int(facts[1].rpartition(":")[2], 16), facts[9]


def usage_of(pid: int) -> dict[str, int]:
    """Threads, descriptors, and MiB of memory of a process; nothing if it has ended."""
    with contextlib.suppress(OSError, KeyError):
        process = Path(f"/proc/{pid}")
        status = dict(
            line.split(":\t") for line in (process / "status").read_text().splitlines() if ":\t" in line
        )
        return {
            "threads": int(status["Threads"]),
            "descriptors": len(list((process / "fd").iterdir())),
            "memory_mib": int(status["VmRSS"].split()[0]) // 1024,
        }
    return {}


def test_strangers_change_nothing_but_the_log(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references(LONGER)  # before there are strangers, which attack all that this process starts
    monkeypatch.setenv("SWIFT_FT_TOKEN", TOKEN)
    with Attack(tmp_path / "go") as attack:
        metrics = ["--metrics-port", str(free_port(in_a_row=5))]
        script = training(tmp_path, SLOW_UNTIL_TOLD)
        run = run_cluster(tmp_path, LONGER, flags=[*PATIENT, *metrics], script=script)
    assert_identical(run, reference)
    assert run.recoveries == []
    assert run.events("MachineLost") == []
    assert len(run.events("MachineJoined")) == len(reference.events("MachineJoined"))
    assert attack.rounds >= ENOUGH_ROUNDS  # each throws everything at every port
    assert attack.refused >= 5
    assert len(attack.agents) == 5  # four machines and a spare
    for usage in attack.agents.values():
        assert usage.most["threads"] <= usage.first["threads"] + 12 + 16, usage  # 16 serve metrics
        assert usage.most["descriptors"] <= usage.first["descriptors"] + AT_ONCE + 30, usage
        assert usage.most["memory_mib"] <= usage.first["memory_mib"] + 64, usage
    lines = [line for line in run.output.splitlines() if "refused a connection from 127.0.0.1" in line]
    assert 5 <= len(lines) <= 5 * 12, lines
    assert TOKEN not in run.output
