"""Workers that replay without their job: how long a replay may stand still."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swift_ft.coordination.agent_channel import channel_pair
from swift_ft.offline.replay_workers import ReplayWorkers

LIMIT_S = 0.6


class Standby:
    """Reports that workers have ended."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self.mine.fileno()

    def receive(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.mine.recv(1024))
        return found


@pytest.fixture
def workers() -> Iterator[ReplayWorkers]:
    made: Any = ReplayWorkers.__new__(ReplayWorkers)
    made._standby = Standby()
    yield made
    made._standby.mine.close()
    made._standby.theirs.close()


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = channel_pair()
    with ours, theirs:
        yield ours, theirs


def beats(channel: socket.socket, *iterations: int) -> None:
    """Heartbeats, each well before the limit."""
    pause = threading.Event()
    for iteration in iterations:
        channel.send(json.dumps({"beat": {"iteration": iteration}}).encode())
        pause.wait(LIMIT_S / 2)


def test_a_replay_that_stands_still_has_an_end(
    workers: ReplayWorkers, channel: tuple[socket.socket, socket.socket]
) -> None:
    """Heartbeats alone are no progress."""
    ours, theirs = channel
    thread = threading.Thread(target=beats, args=(theirs, *[4] * 6))
    thread.start()
    failed = workers._watch({0: ours}, lambda *_: None, LIMIT_S)
    assert failed == {"failed": f"no iteration has ended within {LIMIT_S:g} s"}
    thread.join()


def test_a_long_replay_goes_on(workers: ReplayWorkers, channel: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = channel
    standby: Any = workers._standby

    def replay() -> None:
        beats(theirs, *range(6))
        standby.theirs.send(json.dumps({"status": 0}).encode())

    thread = threading.Thread(target=replay)
    thread.start()
    assert workers._watch({0: ours}, lambda *_: None, LIMIT_S) is None
    thread.join()
