"""Runs have numbers: a name (``--rdzv-id``) may be used again, and each run has a journal of its own.

The rendezvous store holds the newest run of each name. Launchers that start at the same time agree on it by
compare-and-set: they join the newest run, or begin the next one if the newest has ended. A launcher keeps the
run that it has found, so one of an ended run never becomes part of the next one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial

from torch.distributed import DistError

from swift_ft.config import store_keys
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.incarnations import begin
from swift_ft.coordination.journal import open_journal
from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.events import JobClosed
from swift_ft.recovery.job_state import Phase
from swift_ft.torch_adapters.rendezvous_store import PrefixStore, RendezvousStore, Store

_logger = logging.getLogger(__name__)

_CLOSED = "closed"
_LOOKED_AT = 20
"""Names of runs, the newest, that a new one is compared with."""

Connect = Callable[[str], RendezvousStore]
"""Opens a client of the rendezvous store that is confined to the names of one run."""


def find_run(connect: Connect, name: str, close_abandoned: Callable[[str], bool] = lambda _: False) -> str:
    """The run to join: the newest one of a name, or the next one if that has ended.

    Args:
        connect: opens a client of the rendezvous store.
        close_abandoned: closes a run that nobody lives in, and says whether it did.

    Raises:
        RendezvousLostError: if the store does not answer, or is about to end with its last run.
    """
    names = connect(store_keys.runs_of(name))
    try:
        begin_first = partial(_begin_first, connect, names, name)
        run = _newest(names) or begin_first()
        while run != _CLOSED:
            if is_ended(partial(connect, run)):
                run = _begin(connect, names, run, _run(name, _number(run) + 1))
            elif _newest(names) == run:
                if not close_abandoned(run):
                    break
            else:  # it had ended, and was deleted before its journal was read
                run = _newest(names) or begin_first()
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(f"The rendezvous store does not answer ({first_line(error)}).") from error
    if run == _CLOSED:
        raise RendezvousLostError(f"The rendezvous store ends with the last run {name}: start again.")
    return run


def is_ended(connect: Callable[[], RendezvousStore]) -> bool:
    """Whether the run in whose names a client is confined has ended: its journal says so."""
    return Follower(open_journal(connect, by="launcher")).state.phase == Phase.ENDED


def restore_newest(run: str, store: Store) -> None:
    """Let machines that come find a run, in a store that was restarted.

    A launcher that came before may have begun another one in the store, which was empty: it is closed.

    Args:
        run: with its number.
        store: a connection to it.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    key = newest_key(run.rpartition(".")[0])
    found = store.compare_set(key, "", run).decode()
    if found == run:
        return
    store.set(key, run)
    if found != _CLOSED:
        mistaken = RendezvousStore(partial(PrefixStore, store_keys.prefix_of(found), store))
        reason = (
            f"the rendezvous store was started anew, and run {run} goes on in it: start this machine again"
        )
        open_journal(lambda: mistaken, by="launcher").append(JobClosed(reason=reason, cause=Cause.STORE))


def newest_run(connect: Connect, name: str) -> str:
    """The newest run of a name, as :func:`find_run` numbers it. A run's own name stays as it is."""
    names = connect(store_keys.runs_of(name))
    return _newest(names) or name


def newest_key(name: str) -> str:
    """The key of the newest run of a name, in a store that others than :func:`connect` read."""
    return f"{store_keys.prefix_of(store_keys.runs_of(name))}/{store_keys.newest_run()}"


def close_after_run(connect: Connect, name: str, wait_until_over: Callable[[RendezvousStore], None]) -> None:
    """Wait until the newest run of a name is over, and let no other run begin in this store.

    Args:
        connect: opens clients of the store.
        wait_until_over: waits until one run no longer needs the store.
    """
    names = connect(store_keys.runs_of(name))
    while True:
        run = names.get(store_keys.newest_run()).decode()
        wait_until_over(connect(run))
        if names.compare_set(store_keys.newest_run(), run, _CLOSED).decode() == _CLOSED:
            return


def _run(name: str, number: int) -> str:
    """Unlike any other, in other rendezvous stores, too: a store of checkpoints tells runs apart by it."""
    return f"{name}.{number}-{uuid.uuid4().hex[:8]}"


def _newest(names: RendezvousStore) -> str:
    """The newest run; empty if there is none."""
    key = store_keys.newest_run()
    return names.get(key).decode() if names.check([key]) else ""


def _begin_first(connect: Connect, names: RendezvousStore, name: str) -> str:
    """Begin the first run of a name. If others go on in this store, the name may be mistyped."""
    own = _run(name, 1)
    run = _begin(connect, names, "", own)
    if run == own and (others := _note_name(connect, name)):
        _logger.warning(
            "a new run %r begins in this rendezvous store, which has %s already: if this machine is to join "
            "that one, correct its --rdzv-id",
            name,
            ", ".join(map(repr, others)),
            extra={"event": "another_run_is_there", "runs": others},
        )
    return run


def _note_name(connect: Connect, name: str) -> list[str]:
    """Note the name of a run among those in this store. Returns those of others that have not ended."""
    noted = connect(store_keys.NAMES_OF_RUNS)
    noted.set(store_keys.name_of_run(noted.add(store_keys.count_of_names(), 1)), name)
    return runs_going_on(connect, but=name)


def runs_going_on(connect: Connect, *, but: str) -> list[str]:
    """The names of other runs in this store that have not ended.

    Args:
        connect: opens clients of the store.
        but: the name of the run itself.
    """
    noted = connect(store_keys.NAMES_OF_RUNS)
    newest = noted.add(store_keys.count_of_names(), 0)
    keys = map(store_keys.name_of_run, range(max(1, newest - _LOOKED_AT), newest + 1))
    names = dict.fromkeys(noted.get(key).decode() for key in keys if noted.check([key]))
    return [name for name in names if name != but and _goes_on(connect, name)]


def _goes_on(connect: Connect, name: str) -> bool:
    run = newest_run(connect, name)
    return run not in (name, _CLOSED) and not is_ended(partial(connect, run))


def _begin(connect: Connect, names: RendezvousStore, before: str, run: str) -> str:
    """Begin a run after another one. Returns the newest one, which another launcher may have begun.

    The store holds it before others find it: so a store without it was restarted.
    """
    store = connect(run)
    begin(store)
    found = names.compare_set(store_keys.newest_run(), before, run).decode()
    if found != run:
        store.delete_key(store_keys.incarnation())
    return found


def _number(run: str) -> int:
    return int(run.rpartition(".")[2].partition("-")[0])
