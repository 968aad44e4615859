"""The store that a launcher starts outlives its machines by a while, and not for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from swift_ft.config import detection_timings as timings
from swift_ft.errors import RendezvousLostError
from swift_ft.launch.rendezvous import store_service
from swift_ft.launch.rendezvous.store_service import StoreService
from tests.support.clean_fork import CLEAN_FORK
from tests.support.waiting import wait_until

SHORT_S, LONG_S = 0.3, 3600.0
LAUNCHER = """
import sys
from functools import partial
from swift_ft.launch.rendezvous.store_service import run_is_over
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from swift_ft.config.store_address import StoreAddress
client = partial(connect, StoreAddress.parse(sys.argv[1]))
def begin(name):
    store = client(find_run(client, name))
    journal = open_journal(lambda: store, by="test")
    journal.append(ev.JobOpened(machines=1))
    return store, journal
store, journal = begin("job")
if sys.argv[2] == "ends":
    journal.append(ev.JobClosed(reason="it is over"))
if sys.argv[2] == "is over, and another goes on":
    begin("another")
if "is over" in sys.argv[2]:
    run_is_over(store)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("how", "linger_s", "abandoned_s"),
    [
        ("ends", SHORT_S, LONG_S),
        ("is over, and another goes on", SHORT_S, LONG_S),
        ("stays", LONG_S, SHORT_S),
        ("is over", SHORT_S, LONG_S),
    ],
)
def test_it_ends_after_machines_that_say_nothing(how: str, linger_s: float, abandoned_s: float) -> None:
    """Whether their run has ended or not. As long as one of them is connected, it serves, unless all is over.

    A connection that the process had which has started it is none of theirs.
    """
    parent = CLEAN_FORK.Process(target=_outlive_a_launcher, args=(how, linger_s, abandoned_s))
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def _outlive_a_launcher(how: str, linger_s: float, abandoned_s: float) -> None:
    timings.STORE_ALONE_LOOK_S = 0.05
    timings.STORE_ENDED_ALONE_S = linger_s
    timings.STORE_ALONE_S = abandoned_s
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        service = StoreService("127.0.0.1", 0, until_over="job")
    command = [sys.executable, "-c", LAUNCHER, str(service.address), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "here\n"
        if how == "is over":  # a machine that was cut off is connected, as far as one sees here
            wait_until(service.ended, "its end")
        else:
            with pytest.raises(TimeoutError):
                wait_until(service.ended, "its end", 5 * SHORT_S)
        launcher.kill()
    wait_until(service.ended, "its end")


def test_one_that_never_listens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork beside threads may wait for a lock that one of them had."""
    monkeypatch.setattr(store_service, "_LISTENS_S", 0.3)
    monkeypatch.setattr(store_service, "_serve_child", lambda *_: time.sleep(600))
    with pytest.raises(RendezvousLostError, match="it has said nothing for"):
        StoreService("127.0.0.1", 0)


def test_one_that_cannot_be_started_again_says_why() -> None:
    """And it is closed as any other: its lifeline and its process are gone already."""
    service = StoreService("127.0.0.1", 0)
    os.kill(service.pid, signal.SIGKILL)
    wait_until(service.ended, "its end")
    with socket.create_server((service.address.host, service.address.port)):
        with pytest.raises(RendezvousLostError, match="cannot listen at"):
            service.again()
        service.close()


def test_it_ends_with_its_parent_though_another_child_lives() -> None:
    """That one has let it go; and the service has closed what keeps the other one alive."""
    lifeline_r, lifeline_w = os.pipe()
    service = StoreService("127.0.0.1", 0, close_in_child=partial(os.close, lifeline_w))
    other = multiprocessing.get_context("fork").Process(target=_let_go_and_wait, args=(service, lifeline_w))
    other.start()
    service.let_go()
    wait_until(service.ended, "its end")
    assert other.is_alive()
    os.close(lifeline_w)
    assert os.read(lifeline_r, 1) == b""
    other.kill()
    other.join()
    os.close(lifeline_r)


def _let_go_and_wait(service: StoreService, lifeline_w: int) -> None:
    os.close(lifeline_w)
    service.let_go()
    time.sleep(600)


class StoppedStore:
    """The service of another machine's run, which has ended."""

    def __init__(self, error: Exception) -> None:
        self.patience_s = LONG_S
        self._error = error

    def set(self, key: str, value: str) -> None:
        assert self.patience_s == 0.0, "it would be waited for"
        raise self._error


@pytest.mark.parametrize("error", [DistNetworkError("Broken pipe"), RendezvousLostError("nobody answers")])
def test_a_service_that_has_ended_needs_no_word(error: Exception) -> None:
    """Another machine has said so before. The run is as good as it was."""
    store: Any = StoppedStore(error)
    store_service.run_is_over(store)
    assert store.patience_s == 0.0
