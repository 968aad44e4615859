"""Incarnations of the rendezvous store: torch's store forgets everything when its process ends.

The launcher that begins a run gives the store an *incarnation*, a key with a value unlike any other. A store
without it was restarted. The machines that survived then republish what they hold (`restoring.py`), and
set the key last, to another value: so a store has all of a run, or nothing that counts. A connection leads to
one process of the store, so it is enough to look once on each connection.
"""

from __future__ import annotations

import uuid

from swift_ft.config import store_keys
from swift_ft.errors import NotRestoredError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, Store

NOT_RESTORED = "not restored: "
"""The prefix of an incarnation whose run cannot go on. The reason follows it."""


def new_incarnation() -> str:
    """Unlike any other."""
    return uuid.uuid4().hex[:12]


def begin(store: RendezvousStore) -> None:
    """The store holds a run from now on."""
    store.compare_set(store_keys.incarnation(), "", new_incarnation())


def incarnation_of(store: Store | RendezvousStore) -> str:
    """The incarnation; empty if the store has been restarted.

    Raises:
        NotRestoredError: machines have tried to restore the run, and could not.
    """
    key = store_keys.incarnation()
    found = store.get(key).decode() if store.check([key]) else ""
    if found.startswith(NOT_RESTORED):
        raise NotRestoredError(found.removeprefix(NOT_RESTORED))
    return found


def has_begun(store: Store) -> bool:
    """Whether a store holds the run: for clients that do not restore it (:data:`.store_client.Admit`)."""
    return bool(incarnation_of(store))
