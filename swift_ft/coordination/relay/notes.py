"""Notes: facts of which only the newest value counts, such as a worker's progress.

A worker gives them to its agent, the agent to its head, and so on, at most once a second and merged on the
way. The last machine on the way writes them into the store: one key for each group of machines, of which
there are at most :data:`MOST_KEYS`. So neither it nor a reader asks more of the store in a larger job. Losing
a note is harmless, since the next one replaces it. A machine that takes another way sends all that it knows
again.

In a job without heads each machine writes a key of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from swift_ft.config import store_keys
from swift_ft.observe.waits import waiting
from swift_ft.recovery.heads import FANOUT, levels_of
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

MOST_KEYS = 64
"""With 16,384 machines of eight workers a key has 2,048 notes, some 0.3 MB. An etcd takes 1.5 MB."""

Facts = dict[str, dict[str, Any]]
"""By key, what is known; JSON-ready."""


class Notes:
    """The notes that a relay knows, by the slot that each comes from. All threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Facts] = {}  # guarded by the lock, as the next one
        self._changed: dict[int, set[str]] = {}

    def put(self, slot: int, facts: Mapping[str, dict[str, Any]]) -> None:
        """Replace what is known under some keys."""
        with self._lock:
            self._known.setdefault(slot, {}).update(facts)
            self._changed.setdefault(slot, set()).update(facts)

    def put_new(self, slot: int, key: str, facts: dict[str, Any]) -> None:
        """As :meth:`put`, for what may be told again and again without a change."""
        with self._lock:
            told = self._known.get(slot, {}).get(key) == facts
        if not told:
            self.put(slot, {key: facts})

    def all_are_new(self) -> None:
        """Mark all known notes as changed, so that they are passed on again."""
        with self._lock:
            self._changed = {slot: set(facts) for slot, facts in self._known.items()}

    def take(self) -> dict[int, Facts]:
        """The changes since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return {slot: {key: self._known[slot][key] for key in keys} for slot, keys in changed.items()}

    def of(self, slots: Iterable[int]) -> Facts:
        """All that is known of some slots."""
        with self._lock:
            return {key: facts for slot in slots for key, facts in self._known.get(slot, {}).items()}


def write_notes(
    store: RendezvousStore, notes: Notes, changed: Iterable[int], *, machines: int, fanout: int = FANOUT
) -> None:
    """Write what is known where something has changed: of groups in a job with heads, else of machines.

    Args:
        store: the rendezvous store.
        notes: all that is known.
        changed: slots.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
    """
    if levels_of(machines, fanout):
        width = _width(machines)
        for group in sorted({slot // width for slot in changed}):
            slots = range(group * width, (group + 1) * width)
            _write(store, store_keys.notes_of_group(group), notes.of(slots))
    else:
        for slot in changed:
            _write(store, store_keys.notes_of_slot(slot), notes.of([slot]))


class NotesReader:
    """Reads all notes, in two exchanges once all machines have written some. From any thread.

    Args:
        store: the rendezvous store.
    """

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        self._known: frozenset[str] = frozenset()  # keys with a value, which is never deleted

    def read(self, machines: int) -> Facts:
        """All notes that are in the store.

        Args:
            machines: slots of the job.
        """
        keys = [store_keys.notes_of_group(group) for group in range(-(-machines // _width(machines)))]
        keys += [store_keys.notes_of_slot(slot) for slot in range(machines if machines <= FANOUT else 0)]
        self._look_for([key for key in keys if key not in self._known])
        if not self._known:
            return {}
        with waiting("the rendezvous store to say what all workers do"):
            texts = self._store.multi_get(sorted(self._known))
        return {key: facts for text in texts for key, facts in json.loads(text).items()}

    def _look_for(self, keys: list[str]) -> None:
        """Note which of these keys have a value by now. Machines begin to write at different times."""
        if not keys:
            return
        if self._store.check(keys):
            self._known |= {*keys}
        else:
            self._known |= {key for key in keys if self._store.check([key])}


def _width(machines: int) -> int:
    """Machines of a group."""
    return FANOUT * max(1, -(-machines // (FANOUT * MOST_KEYS)))


def _write(store: RendezvousStore, key: str, facts: Facts) -> None:
    store.set(key, json.dumps(facts, separators=(",", ":")))
