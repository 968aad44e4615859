"""A rendezvous store in a process of its own, forked where nothing else has run.

A launcher forks it before it has threads. A test process has those of other tests, and one that makes a store
in the moment of the fork leaves torch's lock taken in the child, which then never listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from swift_ft.config.store_address import StoreAddress
from swift_ft.launch.rendezvous.store_service import StoreService
from tests.support.clean_fork import CLEAN_FORK

_LISTENS_S = 120.0


@dataclass(frozen=True)
class StoreProcess:
    """A store that runs.

    Attributes:
        address: where it listens.
        pid: of the process that serves it.
    """

    address: StoreAddress
    pid: int


@contextmanager
def store_process(host: str = "127.0.0.1") -> Iterator[StoreProcess]:
    """Serve a store at a free port of an address until the context ends."""
    ours, theirs = CLEAN_FORK.Pipe()
    parent = CLEAN_FORK.Process(target=_serve, args=(host, theirs))
    parent.start()
    theirs.close()
    with closing(ours):
        assert ours.poll(_LISTENS_S), "the rendezvous store has not begun to listen"
        yield ours.recv()
    parent.join(_LISTENS_S)
    assert parent.exitcode == 0


def _serve(host: str, told: Connection) -> None:
    with closing(StoreService(host, 0)) as service:
        told.send(StoreProcess(service.address, service.pid))
        told.poll(None)  # until the other end is closed
