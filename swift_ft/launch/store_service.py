"""The rendezvous store as a process of its own, outside of all agents and workers.

Losing any machine, rank 0's included, then loses no coordination. It is torch's TCPStore and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from swift_ft.errors import RendezvousLostError

__all__ = ["StoreService", "connect", "is_listening", "run_is_over"]

_ANSWER_TIMEOUT = timedelta(seconds=60)
_OVER = "over"
_LINGER_S = 10.0


def connect(host: str, port: int, run_id: str, *, timeout_s: float = 30.0) -> Store:
    """A new client of the rendezvous store, confined to the names of one run.

    Raises:
        RendezvousLostError: if nothing answers within the deadline.
    """
    try:
        client = TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s))
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"No rendezvous store answers at {host}:{port} ({str(error).splitlines()[0]}). "
            "Start one with `python -m swift_ft.launch.store_service`, or check --rdzv-endpoint."
        ) from error
    client.set_timeout(_ANSWER_TIMEOUT)
    return PrefixStore(f"swift/{run_id}", client)


def is_listening(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


class StoreService:
    """A forked child that serves the store. Must be made while the process has a single thread.

    Args:
        host: address to listen at.
        port: port to listen at; 0 for a free one.
        until_over: serve on, whatever becomes of the parent, until this run is over (:func:`run_is_over`);
            without it the service ends with its parent, or at :meth:`close`.
    """

    def __init__(self, host: str, port: int, *, until_over: str | None = None) -> None:
        report_r, report_w = os.pipe()
        lifeline_r, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(report_r)
            os.close(self._lifeline)
            os.setsid()
            _serve_child(host, port, report_w, lifeline_r, until_over)
        os.close(report_w)
        os.close(lifeline_r)
        with os.fdopen(report_r) as report:
            answer = report.read()
        if not answer.isdigit():
            os.waitpid(self.pid, 0)
            raise RendezvousLostError(f"The rendezvous store cannot listen at {host}:{port}: {answer}")
        self.host = host
        self.port = int(answer)

    def ended(self) -> bool:
        """Whether the service has died, as its parent is told."""
        return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid

    def close(self) -> None:
        """Stop the service, if it still runs, and wait for its end."""
        os.close(self._lifeline)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def run_is_over(store: Store) -> None:
    """Tell a service that serves one run that nobody needs it any more."""
    store.set(_OVER, "1")


def _serve_child(host: str, port: int, report_w: int, lifeline_r: int, until_over: str | None) -> NoReturn:
    """Serve until the lifeline closes, or until the run is over and its machines have read so."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the lifeline decides, so that nobody loses the store too early
    try:
        store = TCPStore(host, port, None, True, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        os.write(report_w, str(error).splitlines()[0].encode())
        os._exit(1)
    os.write(report_w, str(store.port).encode())
    os.close(report_w)
    if until_over is None:
        os.read(lifeline_r, 1)
    else:
        client = connect("127.0.0.1", store.port, until_over)
        client.set_timeout(timedelta(days=365))
        client.get(_OVER)
        time.sleep(_LINGER_S)
    os._exit(0)


def main(argv: list[str] | None = None) -> None:
    """Serve in the foreground: what a scheduler keeps running on a cluster."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m swift_ft.launch.store_service", description=__doc__)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at")
    parser.add_argument("--port", type=int, default=29400)
    args = parser.parse_args(argv)
    store = TCPStore(args.host, args.port, None, True, wait_for_workers=False)
    print(f"rendezvous store at {args.host}:{store.port}", flush=True)
    ended = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
