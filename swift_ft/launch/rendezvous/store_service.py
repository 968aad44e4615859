"""The rendezvous store as a process of its own, outside of all agents and workers.

Losing any machine, rank 0's included, then loses no coordination. It is torch's TCPStore and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NoReturn

from torch.distributed import DistError

from swift_ft.config import detection_timings as timings
from swift_ft.config import store_keys
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.runs import Connect, close_after_run, is_ended, runs_going_on
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.launch.signals import leave_to_the_launcher
from swift_ft.network.addresses import endpoint, listen_address, split_endpoint
from swift_ft.torch_adapters.connections import connections_to, tcp_connections
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, TCPStore, serve_store

_LISTENS_S = 60.0
_logger = logging.getLogger(__name__)


def is_listening(address: StoreAddress) -> bool:
    """Whether something accepts connections there: at one of several endpoints."""
    for place in address.endpoints:
        with contextlib.suppress(OSError), socket.create_connection(split_endpoint(place), timeout=2.0):
            return True
    return False


class StoreService:
    """A forked child that serves the store. Must be made while the process has a single thread.

    Attributes:
        address: where it listens.
        pid: its process; 0 once that has ended.

    Args:
        host: address to listen at.
        port: port to listen at; 0 for a free one.
        close_in_child: called in the service, at first: it closes what is the parent's alone.
        until_over: serve on, whatever becomes of the parent, until the newest run of this name is over
            (:func:`run_is_over`) or without machines for long, and again where its process dies; without it
            the service ends with its parent, or at :meth:`close`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        close_in_child: Callable[[], None] = lambda: None,
        until_over: str | None = None,
    ) -> None:
        self._close_in_child = close_in_child
        report_r, report_w = os.pipe()
        lifeline_r, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(report_r)
            os.close(self._lifeline)
            close_in_child()
            os.setsid()
            leave_to_the_launcher()  # no machine shall lose the store too early
            if until_over is None:
                _serve_child(host, port, report_w, lambda _: os.read(lifeline_r, 1))
            _keep_serving(host, port, report_w, until_over)
        os.close(report_w)
        os.close(lifeline_r)
        with os.fdopen(report_r) as report:
            # A child that was forked beside threads may wait for a lock that one of them had.
            if select.select([report], [], [], _LISTENS_S)[0]:
                answer = report.read()
            else:
                answer = f"it has said nothing for {_LISTENS_S:g} s"
                os.kill(self.pid, signal.SIGKILL)
        if not answer.isdigit():
            os.waitpid(self.pid, 0)
            os.close(self._lifeline)
            raise RendezvousLostError(
                f"The rendezvous store cannot listen at {endpoint(host, port)}: {answer}"
            )
        self.address = StoreAddress.tcp(host, int(answer))

    def ended(self) -> bool:
        """Whether the service has died. Only its parent can ask."""
        if self.pid:
            self.note_end(os.waitpid(self.pid, os.WNOHANG)[0])
        return not self.pid

    def note_end(self, pid: int) -> None:
        """Its parent has waited for a child, which may have been the service: another may get its pid."""
        if pid == self.pid:
            self.pid = 0

    def again(self) -> StoreService:
        """Serve at the same address once more, empty. The process has ended, and its parent has seen so.

        Raises:
            RendezvousLostError: it cannot listen there.
        """
        self.let_go()
        return StoreService(self.address.host, self.address.port, close_in_child=self._close_in_child)

    def let_go(self) -> None:
        """Close this process's end of the lifeline.

        Each other child of the parent calls it: else the service would outlive its parent.
        """
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        """Stop the service, if it still runs, and wait for its end."""
        self.let_go()
        if self.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = 0


def run_is_over(store: RendezvousStore) -> None:
    """Let the service of one run end: its machines no longer need it.

    It may have ended already, since another machine has said so.
    """
    store.patience_s = 0.0
    with contextlib.suppress(DistError, RuntimeError, RendezvousLostError):
        store.set(store_keys.over(), "1")
        store.check([store_keys.over()])  # torch's client sends, and waits for nothing


def _keep_serving(host: str, port: int, report_w: int, until_over: str) -> NoReturn:
    """Serve in a child, and if that dies, in another one at the same address, until the run is over."""
    inherited = tcp_connections()

    def wait(store: TCPStore) -> None:
        own = StoreAddress.tcp(_own_host(host), store.port)
        is_over = partial(_wait_until_over, store.port, inherited)
        client = partial(_patient_client, own)
        close_after_run(client, until_over, is_over)
        _wait_for_others(store.port, inherited, client, until_over)

    first = True
    while True:
        answer_r, answer_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answer_r)
            if first:
                os.close(report_w)  # its reader waits for the end
            _serve_child(host, port, answer_w, wait)
        os.close(answer_w)
        with os.fdopen(answer_r, "rb") as report:
            answer = report.read()
        if first:
            os.write(report_w, answer)
            os.close(report_w)
            first = False
        if not answer.isdigit():
            os._exit(1)
        port = int(answer)
        if os.waitpid(pid, 0)[1] == 0:
            os._exit(0)
        say_restarted(StoreAddress.tcp(host, port))


def say_restarted(address: StoreAddress) -> None:
    """Tell that the store died, and that this host serves it again: the machines republish what they hold."""
    _logger.warning(
        "the rendezvous store died and is started again at %s, empty; training goes on",
        address,
        extra={"event": "store_restarted"},
    )


def _serve_child(host: str, port: int, report_w: int, wait: Callable[[TCPStore], object]) -> NoReturn:
    """Say the port, or why there is none, and serve until the wait is over."""
    try:
        store = serve_store(host, port)
    except (OSError, DistError, RuntimeError) as error:
        os.write(report_w, first_line(error).encode())
        os._exit(1)
    os.write(report_w, str(store.port).encode())
    os.close(report_w)
    wait(store)
    os._exit(0)


def _own_host(host: str) -> str:
    """The address at which this process reaches its own store (see :func:`serve_store`)."""
    return listen_address(host) or "127.0.0.1"


def _patient_client(address: StoreAddress, run_id: str) -> RendezvousStore:
    client = connect(address, run_id)
    client.set_timeout(timedelta(days=365))
    return client


def _wait_until_over(port: int, inherited: dict[int, str], store: RendezvousStore) -> None:
    """Wait until the machines of a run no longer need the store, or none of them is left.

    Machines that were killed all at once, by a second Ctrl-C for instance, say nothing. New ones may come and
    go on with the run; if it has ended, none will.
    """
    alone_since: float | None = None
    has_ended = False
    while not store.check([store_keys.over()]):
        if _others_are_connected(port, inherited):
            alone_since = None
        elif alone_since is None:
            alone_since, has_ended = time.monotonic(), is_ended(lambda: store)
        else:
            limit_s = timings.STORE_ENDED_ALONE_S if has_ended else timings.STORE_ALONE_S
            if time.monotonic() - alone_since > limit_s:
                return
        time.sleep(timings.STORE_ALONE_LOOK_S)
    time.sleep(timings.STORE_ENDED_ALONE_S)


def _wait_for_others(port: int, inherited: dict[int, str], connect: Connect, name: str) -> None:
    """Launchers of another name may have found this store at the endpoint: until they are gone."""
    while _others_are_connected(port, inherited) and runs_going_on(connect, but=name):
        time.sleep(timings.STORE_ALONE_LOOK_S)


def _others_are_connected(port: int, inherited: dict[int, str]) -> bool:
    """Whether this process has connections at a port but those to itself, of which it has both ends.

    Those of the parent, which the fork has left open here, do not count.
    """
    to_itself = connections_to(port).items() - inherited.items()
    return len(tcp_connections().items() - inherited.items()) > 2 * len(to_itself)
