"""Sentinels that watch machines over real connections."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from swift_ft.launch.detection.policy import LostMachine
from swift_ft.launch.detection.sentinel import BEAT, WATCH, Sentinel
from swift_ft.network import JobSecret, Port, connect
from tests.support.waiting import wait_until

DEADLINE_S = 60.0
HOST = "127.0.0.1"
TOKEN = "a token that the machines share"
SECRET = JobSecret.of_token(TOKEN)
OTHER_PROCESS = f"""
import json, sys
from swift_ft.launch.detection.sentinel import Sentinel
from swift_ft.network import JobSecret, Port
secret = JobSecret.of_token({TOKEN!r})
port = Port("127.0.0.1", secret)
sentinel = Sentinel(silence_s=1.0, on_lost=print, port=port, secret=secret)
print(port.address, flush=True)
for line in sys.stdin:
    sentinel.tell(json.loads(line))
sentinel.close()
"""


class Watcher:
    """A sentinel, and what it reported."""

    def __init__(self, silence_s: float = 1.0) -> None:
        self.lost: queue.Queue[LostMachine] = queue.Queue()
        self.port = Port(HOST, SECRET)
        self.sentinel = Sentinel(silence_s=silence_s, on_lost=self.lost.put, port=self.port, secret=SECRET)

    @property
    def address(self) -> str:
        return self.port.address

    def close(self) -> None:
        self.sentinel.close()
        self.port.close()

    def next_lost(self) -> LostMachine:
        return self.lost.get(timeout=DEADLINE_S)


@pytest.fixture
def made() -> Iterator[Callable[..., Watcher]]:
    watchers: list[Watcher] = []

    def make(silence_s: float = 1.0) -> Watcher:
        watchers.append(Watcher(silence_s))
        return watchers[-1]

    yield make
    for watcher in watchers:
        watcher.close()


@contextlib.contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A machine of a process of its own, and where it is watched."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_a_machine_that_is_killed_is_lost_by_its_connection(made: Callable[..., Watcher]) -> None:
    watcher = made(silence_s=DEADLINE_S)
    with other_process() as (process, address):
        watcher.sentinel.watch({"m": address})
        wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
        process.kill()
        assert watcher.next_lost() == LostMachine("m", "its agent's connection ended")


@pytest.mark.parametrize("connected", [False, True])
def test_the_report_of_a_loss_has_what_the_machine_told_last(
    made: Callable[..., Watcher], connected: bool
) -> None:
    """Up to its end, also where nobody looked in between; and before it was watched."""
    watcher = made(silence_s=DEADLINE_S)
    with other_process() as (process, address):
        assert process.stdin is not None
        if connected:
            watcher.sentinel.watch({"m": address})
            wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
        process.stdin.writelines(f'{{"recorded": [0, {before}]}}\n' for before in (6, 7))
        process.stdin.flush()
        if connected:
            assert watcher.sentinel._watched["m"].recorded == (), "nobody wakes for it"
        time.sleep(0.5)
        if not connected:
            watcher.sentinel.watch({"m": address})
            wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
            time.sleep(0.2)
        process.kill()
        assert watcher.next_lost().recorded == (0, 7)


def test_a_machine_that_is_stopped_is_lost_by_its_silence(made: Callable[..., Watcher]) -> None:
    watcher = made()
    with other_process() as (process, address):
        watcher.sentinel.watch({"m": address})
        wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
        os.kill(process.pid, signal.SIGSTOP)
        lost = watcher.next_lost()
    assert lost.silent
    assert "was silent for" in lost.reason


def test_several_that_are_lost_at_once_are_all_found(made: Callable[..., Watcher]) -> None:
    """None of them waits until another one was reported."""
    watcher = made(silence_s=DEADLINE_S)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(other_process()) for _ in range(3)]
        watcher.sentinel.watch({f"m{i}": address for i, (_, address) in enumerate(others)})
        wait_until(lambda: len(watcher.sentinel._lines) == 3, "all connections")
        for process, _ in others:
            process.kill()
        assert {watcher.next_lost().machine for _ in others} == {"m0", "m1", "m2"}


@contextlib.contextmanager
def three_others(watcher: Watcher) -> Iterator[list[int]]:
    """Processes of three machines that are watched, which are named m0, m1 and m2."""
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(other_process()) for _ in range(3)]
        watcher.sentinel.watch({f"m{i}": address for i, (_, address) in enumerate(others)})
        wait_until(lambda: len(watcher.sentinel._lines) == 3, "all connections")
        yield [process.pid for process, _ in others]


def test_all_that_fall_silent_at_once_are_put_off_once(made: Callable[..., Watcher]) -> None:
    """Its own link may be gone. If it is not, none of them waits for longer than one more silence."""
    watcher = made()
    with three_others(watcher) as pids:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        lost = [watcher.next_lost() for _ in pids]
    assert {one.machine for one in lost} == {"m0", "m1", "m2"}
    assert all(one.silent and one.deaf for one in lost)
    seconds = [float(one.reason.split()[-2]) for one in lost]  # its agent was silent for 2.0 s
    assert min(seconds) >= 1.9


def test_those_that_are_heard_again_meanwhile_are_not_lost(made: Callable[..., Watcher]) -> None:
    watcher = made()
    with three_others(watcher) as pids:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        watched = watcher.sentinel._watched
        wait_until(lambda: all(watched[f"m{i}"].put_off for i in range(3)), "the delay")
        for pid in pids[1:]:
            os.kill(pid, signal.SIGCONT)
        lost = watcher.next_lost()
        assert (lost.machine, lost.silent, lost.deaf) == ("m0", True, False)
        assert not watched["m1"].over
        assert not watched["m2"].over
    assert {watcher.next_lost().reason for _ in pids[1:]} == {"its agent's connection ended"}


def test_two_of_three_that_fall_silent_are_lost_at_once(made: Callable[..., Watcher]) -> None:
    watcher = made()
    with three_others(watcher) as pids:
        for pid in pids[:2]:
            os.kill(pid, signal.SIGSTOP)
        lost = [watcher.next_lost() for _ in pids[:2]]
        assert watcher.lost.empty()
    assert {(one.machine, one.silent, one.deaf) for one in lost} == {("m0", True, False), ("m1", True, False)}


def test_a_machine_that_says_goodbye_is_not_lost(made: Callable[..., Watcher]) -> None:
    leaving, other, watcher = made(DEADLINE_S), made(DEADLINE_S), made(DEADLINE_S)
    watcher.sentinel.watch({"leaving": leaving.address, "other": other.address})
    wait_until(lambda: len(watcher.sentinel._lines) == 2, "both connections")
    leaving.sentinel.close()
    wait_until(lambda: watcher.sentinel._watched["leaving"].over, "the goodbye")
    assert watcher.lost.empty()


def test_nothing_listens_there(made: Callable[..., Watcher]) -> None:
    with socket.create_server((HOST, 0)) as closed:
        address = f"{HOST}:{closed.getsockname()[1]}"
    watcher = made(DEADLINE_S)
    watcher.sentinel.watch({"m": address})
    assert watcher.next_lost() == LostMachine("m", "its agent cannot be reached (Connection refused)")


def test_a_host_that_does_not_answer_holds_up_no_other(made: Callable[..., Watcher]) -> None:
    """Its packets vanish, as those to a host without power: here, since its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        waiting = stack.enter_context(socket.create_connection(full.getsockname()))
        process, address = stack.enter_context(other_process())
        watcher = made()
        watcher.sentinel.watch({"dead": f"{HOST}:{full.getsockname()[1]}", "m": address})
        wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
        assert waiting.fileno() >= 0
        assert watcher.next_lost() == LostMachine("dead", "its agent cannot be reached (timed out)")
        process.kill()
        assert watcher.next_lost().machine == "m"


def test_one_is_watched_again_if_the_ring_still_has_it(made: Callable[..., Watcher]) -> None:
    """Its loss was not heard, for example because the one that reported it was fenced itself."""
    watcher = made(DEADLINE_S)
    with other_process() as (process, address):
        watcher.sentinel.watch({"m": address})
        wait_until(lambda: "m" in watcher.sentinel._lines, "the connection")
        process.kill()
        assert watcher.next_lost().machine == "m"
        watcher.sentinel.watch({"m": address})
        assert watcher.next_lost().machine == "m"


def test_beats_go_on_while_a_report_is_held_up(made: Callable[..., Watcher]) -> None:
    """The journal may take its time, and other machines must not take that for this one's silence."""
    reported, may_go_on = threading.Event(), threading.Event()

    def held_up(_: LostMachine) -> None:
        reported.set()
        may_go_on.wait(DEADLINE_S)

    with socket.create_server((HOST, 0)) as closed:
        address = f"{HOST}:{closed.getsockname()[1]}"
    port = Port(HOST, SECRET)
    sentinel = Sentinel(silence_s=1.0, on_lost=held_up, port=port, secret=SECRET)
    try:
        sentinel.watch({"m": address})
        assert reported.wait(DEADLINE_S)
        with contextlib.closing(connect(port.address, SECRET, WATCH, timeout_s=DEADLINE_S)) as line:
            assert [line.receive(DEADLINE_S), line.receive(DEADLINE_S)] == [BEAT, BEAT]
    finally:
        may_go_on.set()
        sentinel.close()
        port.close()
