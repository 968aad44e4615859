"""Notes: facts of which only the newest value counts, such as a worker's progress.

A worker gives them to its agent, the agent to its head, and so on, at most once a second and merged on the
way. The last machine on the way writes them into the store: one key for each group of machines, so that a
reader needs few questions, however many workers there are. Losing a note is harmless, since the next one
replaces it. A machine that takes another way sends all that it knows again.

In a job without heads each machine writes a key of its own (:func:`swift_ft.recovery.heads.group_of`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from swift_ft.recovery.heads import FANOUT, group_of, groups_of
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["Facts", "Notes", "notes_key", "read_notes", "write_notes"]

Facts = dict[str, dict[str, Any]]
"""By key, what is known; JSON-ready."""


class Notes:
    """What a relay knows, by the slot that it comes from. All threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Facts] = {}  # guarded by the lock, as the next one
        self._changed: dict[int, set[str]] = {}

    def put(self, slot: int, facts: Mapping[str, dict[str, Any]]) -> None:
        """Replace what is known under some keys."""
        with self._lock:
            self._known.setdefault(slot, {}).update(facts)
            self._changed.setdefault(slot, set()).update(facts)

    def all_are_new(self) -> None:
        """What was passed on is to be passed on again."""
        with self._lock:
            self._changed = {slot: set(facts) for slot, facts in self._known.items()}

    def take(self) -> dict[int, Facts]:
        """What has changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return {slot: {key: self._known[slot][key] for key in keys} for slot, keys in changed.items()}

    def of(self, slots: Iterable[int]) -> Facts:
        """All that is known of some slots."""
        with self._lock:
            return {key: facts for slot in slots for key, facts in self._known.get(slot, {}).items()}


def notes_key(group: int) -> str:
    """The key of the store that has the notes of a group of machines."""
    return f"notes/{group}"


def write_notes(
    store: RendezvousStore, notes: Notes, changed: Iterable[int], *, machines: int, fanout: int = FANOUT
) -> None:
    """Write what is known of the groups in which something has changed.

    Args:
        store: the rendezvous store.
        notes: all that is known.
        changed: slots.
        machines: of the job.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
    """
    groups = groups_of(machines, fanout)
    for group in sorted({group_of(slot, machines, fanout) for slot in changed}):
        store.set(notes_key(group), json.dumps(notes.of(groups[group]), separators=(",", ":")))


def read_notes(store: RendezvousStore, machines: int, fanout: int = FANOUT) -> Facts:
    """All notes that are in the store.

    Args:
        store: the rendezvous store.
        machines: of the job.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
    """
    keys = [notes_key(group) for group in range(len(groups_of(machines, fanout)))]
    found: Facts = {}
    for key in keys:
        if store.check([key]):
            found |= json.loads(store.get(key))
    return found
