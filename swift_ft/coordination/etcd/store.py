"""etcd as torch sees it: a key-value store that process groups and all other clients use as any other one.

torch calls it from C++ threads, too, and for each thread there is an own connection. A method raises what
torch's own store raises: ``DistStoreError`` if a key does not come in time, ``DistNetworkError`` if no member
answers.

**Written once.** A request without an answer is sent again, to another member, and the first one may still be
carried out: minutes later, if its member was frozen. So each store has a marker, a key of its own, that every
write replaces and whose revision every write demands. Whichever copy of a request comes first is carried out,
and the others find the marker changed.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistStoreError

from swift_ft.config import store_keys
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.etcd.block_log import EtcdBlockLog
from swift_ft.coordination.etcd.client import Compacted, EtcdClient, decoded, encoded
from swift_ft.torch_adapters.rendezvous_store import Store

_AT_ONCE = 100
"""Operations in one transaction: etcd takes 128."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key that is set.

    Attributes:
        value: its value.
        revision: the cluster's revision in which it was last set.
    """

    value: bytes
    revision: int


class EtcdStore(Store):
    """A store of the names that begin with a prefix.

    Args:
        prefix: begins every key.
        silence_s: how long no member may answer before a call fails. A wait for a key has its own timeout.
    """

    if TYPE_CHECKING:
        timeout: timedelta  # torch's stubs leave it out

    def __init__(self, address: StoreAddress, prefix: str, *, silence_s: float) -> None:
        super().__init__()
        self._address = address
        self._prefix = prefix
        self._silence_s = silence_s
        self._over = threading.Event()
        self._of_thread = threading.local()
        self._writing = threading.Lock()
        # Guarded by the lock.
        self._marker = self._key(store_keys.writer(uuid.uuid4().hex))
        self._marked_in = 0  # the revision of the marker, as far as this store knows
        self._serial = 0

    def abort(self) -> None:
        """End what waits in this store, from any thread."""
        self._over.set()

    # ------------------------------------------------------------------------------------- torch's interface

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._write([], [_put(self._key(key), value)], [])

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for it up to the timeout."""
        limit = self.timeout
        return self._awaited(key, time.monotonic() + limit.total_seconds(), limit).value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        with self._writing:
            found = self._find([key])[0]
            while True:
                total = (int(found.value) if found is not None else 0) + amount
                lost = self._write_locked(
                    [self._unchanged(key, found)], [_put(self._key(key), str(total))], [key]
                )
                if lost is None:
                    return total
                found = lost[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        with self._writing:
            found = self._find([key])[0]
            while True:
                whole = (found.value if found is not None else b"") + _bytes(value)
                lost = self._write_locked([self._unchanged(key, found)], [_put(self._key(key), whole)], [key])
                if lost is None:
                    return
                found = lost[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; an empty one stands for a key that is not set, too."""
        expected, desired = _bytes(expected), _bytes(desired)
        with self._writing:
            found: KeyValue | None = None
            if expected:
                found = self._find([key])[0]
            while True:
                if found is None and expected:
                    return expected  # as torch's store
                if found is not None and found.value != expected:
                    return found.value
                lost = self._write_locked(
                    [self._unchanged(key, found)], [_put(self._key(key), desired)], [key]
                )
                if lost is None:
                    return desired
                found = lost[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key. Whether it was set."""
        with self._writing:
            found = self._find([key])[0]
            while found is not None:
                lost = self._write_locked([self._unchanged(key, found)], [_delete(self._key(key))], [key])
                if lost is None:
                    return True
                found = lost[0]
        return False

    deleteKey = delete_key  # torch's C++ looks for this name

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set. Does not wait."""
        return all(found is not None for found in self._find(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        missing = [key for key, found in zip(keys, self._find(keys), strict=True) if found is None]
        for key in missing:
            self._awaited(key, deadline, limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys. Waits for them up to the timeout."""
        limit = self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        found = self._find(keys)
        return [
            (had if had is not None else self._awaited(key, deadline, limit)).value
            for key, had in zip(keys, found, strict=True)
        ]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        puts = [_put(self._key(key), value) for key, value in zip(keys, values, strict=True)]
        for first in range(0, len(puts), _AT_ONCE):
            self._write([], puts[first : first + _AT_ONCE], [])

    def has_extended_api(self) -> bool:
        """Whether it can append, and take several keys at once."""
        return True

    def clone(self) -> EtcdStore:
        """Another connection to the same names."""
        other = EtcdStore(self._address, self._prefix, silence_s=self._silence_s)
        other.set_timeout(self.timeout)
        return other

    # ------------------------------------------------------------------------------------------- beyond torch

    def block_log(self) -> EtcdBlockLog:
        """The journal's blocks among these names."""
        return EtcdBlockLog(self._address, self._prefix, answer_s=self._silence_s)

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def _client(self) -> EtcdClient:
        client: EtcdClient | None = getattr(self._of_thread, "client", None)
        if client is None:
            client = self._of_thread.client = EtcdClient(self._address, self._over.is_set)
        return client

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _deadline(self) -> float:
        return time.monotonic() + self._silence_s

    def _find(self, keys: Sequence[str]) -> list[KeyValue | None]:
        found: list[KeyValue | None] = []
        for first in range(0, len(keys), _AT_ONCE):
            reads = [_range(self._key(key)) for key in keys[first : first + _AT_ONCE]]
            answer = self._client.call("/kv/txn", {"success": reads}, self._deadline())
            found += map(_key_value, answer.get("responses", ()))
        return found

    def _awaited(self, key: str, deadline: float, limit: timedelta) -> KeyValue:
        """The value of a key that may not be there yet."""
        client = self._client
        while True:
            answer = client.call("/kv/range", {"key": encoded(self._key(key))}, self._deadline())
            if kvs := answer.get("kvs"):
                return _of(kvs[0])
            client.compact_history(self._deadline())
            if time.monotonic() >= deadline:
                raise DistStoreError(
                    f"wait timeout after {limit.total_seconds() * 1000:.0f}ms, keys: /{self._key(key)}"
                )
            try:
                for event in client.watch(self._key(key), "", client.revision + 1, deadline):
                    if event.value is not None:
                        return KeyValue(event.value, event.revision)
            except Compacted:
                continue  # what is there now is asked for again

    # ------------------------------------------------------------------------------------------------ writing

    def _unchanged(self, key: str, found: KeyValue | None) -> dict[str, Any]:
        return _mod_revision(self._key(key), found.revision if found is not None else 0)

    def _write(self, compare: list[Any], changes: list[Any], reads: Sequence[str]) -> None:
        with self._writing:
            self._write_locked(compare, changes, reads)

    def _write_locked(
        self, compare: list[Any], changes: list[Any], reads: Sequence[str]
    ) -> list[KeyValue | None] | None:
        """Change keys once if a condition holds.

        Returns:
            None if it is done. Else the condition does not hold, and these are the keys that were asked for.
        """
        self._serial += 1
        serial = str(self._serial)
        client, deadline = self._client, self._deadline()
        while True:
            request = {
                # A request without an answer goes to the next member, and the first one may
                # still carry it out later. Of two copies only the first one finds the
                # marker unchanged (decision 54).
                "compare": [_mod_revision(self._marker, self._marked_in), *compare],
                "success": [*changes, _put(self._marker, serial)],
                "failure": [_range(self._marker), *(_range(self._key(key)) for key in reads)],
            }
            answer = client.call("/kv/txn", request, deadline)
            client.compact_history(deadline)
            if answer.get("succeeded"):
                self._marked_in = client.revision
                return None
            marker, *found = map(_key_value, answer["responses"])
            revision = marker.revision if marker is not None else 0
            known, self._marked_in = self._marked_in, revision
            if marker is not None and marker.value.decode() == serial:
                return None  # an earlier copy of this request has done it
            if revision == known:
                return found


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _put(key: str, value: str | bytes) -> dict[str, Any]:
    return {"request_put": {"key": encoded(key), "value": encoded(value)}}


def _delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": encoded(key)}}


def _range(key: str) -> dict[str, Any]:
    return {"request_range": {"key": encoded(key)}}


def _mod_revision(key: str, revision: int) -> dict[str, Any]:
    """The condition that a key was last set in a revision; 0: it is not set."""
    return {"key": encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _key_value(response: dict[str, Any]) -> KeyValue | None:
    kvs = response["response_range"].get("kvs")
    return _of(kvs[0]) if kvs else None


def _of(kv: dict[str, Any]) -> KeyValue:
    return KeyValue(decoded(kv.get("value", "")), int(kv["mod_revision"]))
