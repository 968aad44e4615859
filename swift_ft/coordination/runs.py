"""Runs have numbers: a name (``--rdzv-id``) may be used again, and each run has a journal of its own.

The rendezvous store holds the newest run of each name. Launchers that start at the same time agree on it by
compare-and-set: they join the newest run, or begin the next one if the newest has ended. A launcher keeps the
run that it has found, so one of an ended run never becomes part of the next one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial

from torch.distributed import DistError

from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import prefix_of
from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.recovery.job_state import Phase
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["close_after_run", "find_run", "is_ended", "newest_key", "newest_run"]

_NEWEST = "newest"
_CLOSED = "closed"

Connect = Callable[[str], RendezvousStore]
"""Opens a client of the rendezvous store that is confined to the names of one run."""


def find_run(connect: Connect, name: str) -> str:
    """The run to join: the newest one of a name, or the next one if that has ended.

    Raises:
        RendezvousLostError: if the store does not answer, or is about to end with its last run.
    """
    names = connect(_names(name))
    try:
        run = names.compare_set(_NEWEST, "", _run(name, 1)).decode()
        while run != _CLOSED:
            if is_ended(partial(connect, run)):
                run = names.compare_set(_NEWEST, run, _run(name, _number(run) + 1)).decode()
            elif names.check([_NEWEST]) and names.get(_NEWEST).decode() == run:
                break
            else:  # it had ended, and was deleted before its journal was read
                run = names.compare_set(_NEWEST, "", _run(name, 1)).decode()
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(f"The rendezvous store does not answer ({first_line(error)}).") from error
    if run == _CLOSED:
        raise RendezvousLostError(f"The rendezvous store ends with the last run {name}: start again.")
    return run


def is_ended(connect: Callable[[], RendezvousStore]) -> bool:
    """Whether the run in whose names a client is confined has ended: its journal says so."""
    return Follower(open_journal(connect, by="launcher")).state.phase == Phase.ENDED


def newest_run(connect: Connect, name: str) -> str:
    """The newest run of a name, as :func:`find_run` numbers it. A run's own name stays as it is."""
    names = connect(_names(name))
    return names.get(_NEWEST).decode() if names.check([_NEWEST]) else name


def newest_key(name: str) -> str:
    """The key of the newest run of a name, in a store that others than :func:`connect` read."""
    return f"{prefix_of(_names(name))}/{_NEWEST}"


def close_after_run(connect: Connect, name: str, wait_until_over: Callable[[RendezvousStore], None]) -> None:
    """Wait until the newest run of a name is over, and let no other run begin in this store.

    Args:
        connect: opens clients of the store.
        name: of the runs.
        wait_until_over: waits until one run no longer needs the store.
    """
    names = connect(_names(name))
    while True:
        run = names.get(_NEWEST).decode()
        wait_until_over(connect(run))
        if names.compare_set(_NEWEST, run, _CLOSED).decode() == _CLOSED:
            return


def _names(name: str) -> str:
    return f"{name}/runs"


def _run(name: str, number: int) -> str:
    """Unlike any other, in other rendezvous stores, too: a store of checkpoints tells runs apart by it."""
    return f"{name}.{number}-{uuid.uuid4().hex[:8]}"


def _number(run: str) -> int:
    return int(run.rpartition(".")[2].partition("-")[0])
