"""Copies of the keys that machines set in the rendezvous store, in case the store is lost.

A worker tells its agent over its line (`relay/lines.py`), and the agent tells another machine, the *holder*
(`key_holding.py`), so that the keys of a lost machine outlive it. All of it is set again before the journal
is offered to a store that was restarted (`restoring.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from swift_ft.config import store_keys
from swift_ft.torch_adapters.rendezvous_store import Store


class KeptKeys:
    """The newest values, by key: of this machine, and of those that it is the holder of.

    All threads may use it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._own: dict[str, str] = {}
        self._adopted: set[str] = set()  # of them, what only lost machines have set: it may be outdated
        self._held: dict[str, dict[str, str]] = {}  # by machine
        self._news: dict[str, str | None] = {}  # what the holder of this machine's keys has not been told
        self._woken = False

    def put(self, key: str, value: str | None) -> None:
        """Keep a value; None: the key was deleted."""
        with self._changed:
            self._adopted.discard(key)
            _put(self._own, key, value)
            self._news[key] = value
            self._changed.notify_all()

    def put_machine(self, machine: str) -> None:
        """Note that the keys of a machine are among this one's own, or that it has set none."""
        self.put(store_keys.restore_kept(machine), "1")

    # ------------------------------------------------------------------------------ for other machines

    def hold(self, machine: str, values: dict[str, str | None], *, anew: bool) -> None:
        """Keep values for another machine.

        Args:
            machine: whose keys they are.
            values: as :meth:`put` takes them.
            anew: forget first what was held for it.
        """
        with self._changed:
            held = self._held.setdefault(machine, {})
            if anew:
                held.clear()
            for key, value in values.items():
                _put(held, key, value)

    def release(self, machine: str) -> None:
        """Another machine holds its keys from now on."""
        with self._changed:
            self._held.pop(machine, None)

    def adopt(self, machine: str) -> bool:
        """A machine is lost: what was held for it is this machine's own from now on. False: nothing was."""
        with self._changed:
            held = self._held.pop(machine, None)
            if held is None:
                return False
            for key, value in held.items():
                if key not in self._own:
                    self.put(key, value)
                    self._adopted.add(key)
            self.put_machine(machine)
            self._adopted.add(store_keys.restore_kept(machine))
            return True

    # -------------------------------------------------------------------------------- for the holder

    def wait_for_news(self, timeout_s: float) -> bool:
        """Wait for changes that the holder has not been told of. False if there are none in time."""
        with self._changed:
            found = self._changed.wait_for(lambda: bool(self._news) or self._woken, timeout_s)
            self._woken = False
            return found

    def wake(self) -> None:
        """End a wait for news."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take_news(self) -> dict[str, str | None]:
        """These changes, which count as told from now on."""
        with self._changed:
            news, self._news = self._news, {}
            return news

    def take_all(self) -> dict[str, str | None]:
        """All own keys, for a new holder."""
        with self._changed:
            self._news = {}
            return {**self._own}

    # ---------------------------------------------------------------------------- for an empty store

    def put_back(self, store: Store) -> None:
        """Set what this machine itself has set, where a store does not have it."""
        with self._changed:
            own = {key: value for key, value in self._own.items() if key not in self._adopted}
        _set_missing(store, own)

    def put_back_others(self, store: Store) -> None:
        """Set what other machines had set. Those that live have put back theirs, which may be newer."""
        with self._changed:
            adopted = {key: self._own[key] for key in self._adopted if key in self._own}
            held = {machine: dict(keys) for machine, keys in self._held.items()}
        notes = store_keys.restore_kept("")
        noted = {key: adopted.pop(key) for key in list(adopted) if key.startswith(notes)}
        _set_missing(store, adopted)
        _set_missing(store, noted)  # last: they say that the keys are there
        for machine, keys in held.items():
            _set_missing(store, {**keys, store_keys.restore_kept(machine): "1"})

    @staticmethod
    def missing(store: Store, machines: Collection[str]) -> list[str]:
        """The machines whose keys no other machine has put back."""
        return absent(store, {machine: store_keys.restore_kept(machine) for machine in machines})


def absent(store: Store, keys: Mapping[str, str]) -> list[str]:
    """Of machines and a key of each, those whose key is not set. One question, if all are."""
    if not keys or store.check(list(keys.values())):
        return []
    return [machine for machine, key in keys.items() if not store.check([key])]


def _put(values: dict[str, str], key: str, value: str | None) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def _set_missing(store: Store, values: dict[str, str]) -> None:
    if values and not store.check(list(values)):
        for key, value in values.items():
            store.compare_set(key, "", value)
