"""The journal's blocks in etcd: its revisions give the order, and a watch brings the blocks.

A block is a key that is created once, under the block's name. So an append that is repeated adds nothing, and
writers do not wait for one another: the order of blocks is that in which etcd created them. A watch brings
them in this order, and goes on at any member from the revision that was seen last. The number of a block
follows by counting, from the key ``first``, which changes in the same transaction that deletes blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import DistError

from swift_ft.config import store_keys
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.block_log import BlockGoneError
from swift_ft.coordination.etcd.client import Compacted, EtcdClient, decoded, encoded, prefix_end
from swift_ft.errors import RendezvousLostError, first_line

_DELETED_AT_ONCE = 100
"""Blocks that one transaction deletes: etcd takes 128 operations."""
_READ_AT_ONCE = 512
_CHUNK = 512 << 10
"""Characters of a snapshot in one key: etcd takes requests of 1.5 MiB."""


class EtcdBlockLog:
    """A :class:`swift_ft.coordination.block_log.BlockLog` in etcd.

    Args:
        prefix: begins every key.
        answer_s: how long no member may answer before the store counts as lost.
    """

    def __init__(self, address: StoreAddress, prefix: str, *, answer_s: float) -> None:
        self._address = address
        self._prefix = prefix
        self._blocks = self._key(store_keys.journal_block_named(""))
        self._first = self._key(store_keys.journal_first(""))
        self._snapshot = self._key(store_keys.journal_snapshot(""))
        self._answer_s = answer_s
        self._of_thread = threading.local()
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._read: dict[int, bytes] = {}  # blocks that have come, by number
        self._next = 0  # number of the block that comes next, if the revision is known
        self._revision: int | None = None  # of the block before it; None: not known yet
        self._follows = False
        self._error: BaseException | None = None

    # ----------------------------------------------------------------------------------------------- blocks

    def append(self, text: str, name: str) -> None:
        """See :meth:`BlockLog.append`. A repeated one adds nothing, as long as the block is there."""
        key = encoded(self._key(store_keys.journal_block_named(name)))
        absent = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        put = {"request_put": {"key": key, "value": encoded(text)}}
        with _answers(self._address):
            self._client.call("/kv/txn", {"compare": [absent], "success": [put]}, self._deadline())
            self._client.compact_history(self._deadline())

    def read(self, number: int, timeout_s: float) -> bytes | None:
        """See :meth:`BlockLog.read`."""
        with self._changed, _answers(self._address):
            self._aim_at(number)
            if number not in self._read and timeout_s <= 0:
                self._fetch(self._client, number)
            elif number not in self._read:
                self._follow()
                self._changed.wait_for(lambda: number in self._read or self._error is not None, timeout_s)
            if number not in self._read and self._error is not None:
                error, self._error = self._error, None
                raise error
            return self._read.get(number)

    def first(self) -> int:
        """See :meth:`BlockLog.first`."""
        with _answers(self._address):
            answer = self._client.call("/kv/range", {"key": encoded(self._first)}, self._deadline())
            return _number(answer.get("kvs"))

    def delete_before(self, number: int) -> None:
        """See :meth:`BlockLog.delete_before`. etcd then forgets that they were there."""
        with _answers(self._address):
            while self._delete_some(number):
                pass

    # --------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> bytes | None:
        """See :meth:`BlockLog.snapshot`."""
        with _answers(self._address):
            while True:
                answer = self._client.call("/kv/range", {"key": encoded(self._snapshot)}, self._deadline())
                if not answer.get("kvs"):
                    return None
                number, chunks = decoded(answer["kvs"][0]["value"]).split()
                found = self._chunks(int(number))
                if len(found) == int(chunks):  # else a newer one has just replaced it
                    return b"".join(found)

    def put_snapshot(self, text: str, number: int) -> None:
        """See :meth:`BlockLog.put_snapshot`."""
        chunks = [text[start : start + _CHUNK] for start in range(0, max(len(text), 1), _CHUNK)]
        with _answers(self._address):
            for index, chunk in enumerate(chunks):
                put = {"key": encoded(self._piece(number, index)), "value": encoded(chunk)}
                self._client.call("/kv/put", put, self._deadline())
            newest = self._raise_snapshot(number, len(chunks))
            older = {"key": encoded(self._piece(0)), "range_end": encoded(self._piece(newest))}
            self._client.call("/kv/deleterange", older, self._deadline())

    def _raise_snapshot(self, number: int, chunks: int) -> int:
        """Let the newest snapshot be this one, unless there is a newer one. Returns the newest."""
        key = encoded(self._snapshot)
        while True:
            answer = self._client.call("/kv/range", {"key": key}, self._deadline())
            found = (answer.get("kvs") or [None])[0]
            newest = int(decoded(found["value"]).split()[0]) if found else -1
            if newest >= number:
                return newest
            revision = int(found["mod_revision"]) if found else 0
            same = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            put = {"request_put": {"key": key, "value": encoded(f"{number} {chunks}")}}
            self._client.call("/kv/txn", {"compare": [same], "success": [put]}, self._deadline())

    def _chunks(self, number: int) -> list[bytes]:
        request = {"key": encoded(self._piece(number)), "range_end": encoded(self._piece(number + 1))}
        kvs = self._client.call("/kv/range", request, self._deadline()).get("kvs", ())
        return [decoded(kv.get("value", "")) for kv in kvs]

    def _piece(self, number: int, index: int = 0) -> str:
        return self._key(store_keys.journal_snapshot_piece(number, index))

    # ----------------------------------------------------------------------------------------------- reading

    def _aim_at(self, number: int) -> None:
        """Let the blocks from a number on be read next, if they are not the ones that come anyway."""
        for old in [known for known in self._read if known < number]:
            del self._read[old]
        if number not in self._read and (number < self._next or self._revision is None):
            self._read.clear()
            self._revision = None
            self._fetch(self._client, number)
            self._changed.notify_all()

    def _follow(self) -> None:
        if not self._follows:
            self._follows = True
            threading.Thread(target=self._watch, name="swift-etcd-watch", daemon=True).start()

    def _watch(self) -> None:
        """Bring blocks as they are written. The thread goes on as long as the process does."""
        client = EtcdClient(self._address)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._revision is not None)  # until someone reads on
                after = self._revision
            assert after is not None
            try:
                for event in client.watch(self._blocks, prefix_end(self._blocks), after + 1):
                    with self._changed:
                        if self._revision != after:  # it reads elsewhere now
                            break
                        if event.value is not None:
                            self._add(event.value, event.revision)
                        self._revision = after = event.revision
                        self._changed.notify_all()
            except Compacted:
                self._find_again(client)
            except Exception as error:  # no thread dies silently
                self._fail(error)

    def _find_again(self, client: EtcdClient) -> None:
        with self._changed:
            try:
                self._fetch(client, self._next)
            except Exception as error:
                self._fail(error)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _fetch(self, client: EtcdClient, number: int) -> None:
        """Read what is there from the next block on, or from a number if none is known. Called with the lock.

        Where fewer blocks are there, the next one to come gets its own number all the same.
        """
        known = self._revision
        blocks: dict[str, Any] = {
            "key": encoded(self._blocks),
            "range_end": encoded(prefix_end(self._blocks)),
            "sort_target": "CREATE",
            "sort_order": "ASCEND",
        }
        if known is not None:
            blocks |= {"min_create_revision": known + 1, "limit": _READ_AT_ONCE}
        reads = [{"request_range": blocks}, {"request_range": {"key": encoded(self._first)}}]
        answer = client.call("/kv/txn", {"success": reads}, self._deadline())
        found, first = (response["response_range"].get("kvs") or [] for response in answer["responses"])
        lowest = _number(first)
        wanted = number if known is None else self._next
        if wanted < lowest:
            self._revision = None
            raise BlockGoneError(f"block {wanted} of the journal is gone")
        if known is None:
            skipped = min(number - lowest, len(found))
            found, self._next, self._revision = found[skipped:], lowest + skipped, client.revision
        for kv in found:
            self._add(decoded(kv["value"]), int(kv["create_revision"]))

    def _add(self, text: bytes, revision: int) -> None:
        self._read[self._next] = text
        self._next += 1
        self._revision = revision

    # ---------------------------------------------------------------------------------------------- deleting

    def _delete_some(self, number: int) -> bool:
        """Delete some blocks before a number. Whether there may be more."""
        blocks = {
            "key": encoded(self._blocks),
            "range_end": encoded(prefix_end(self._blocks)),
            "sort_target": "CREATE",
            "sort_order": "ASCEND",
            "keys_only": True,
            "limit": _DELETED_AT_ONCE + 1,
        }
        reads = [{"request_range": blocks}, {"request_range": {"key": encoded(self._first)}}]
        answer = self._client.call("/kv/txn", {"success": reads}, self._deadline())
        found, first = (response["response_range"].get("kvs") or [] for response in answer["responses"])
        lowest = _number(first)
        count = min(number - lowest, _DELETED_AT_ONCE, len(found))
        if count <= 0:
            return False
        key = encoded(self._first)
        revision = int(first[0]["mod_revision"]) if first else 0
        same = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        changes: list[dict[str, Any]] = [{"request_delete_range": {"key": kv["key"]}} for kv in found[:count]]
        changes.append({"request_put": {"key": key, "value": encoded(str(lowest + count))}})
        self._client.call("/kv/txn", {"compare": [same], "success": changes}, self._deadline())
        if lowest + count >= number:
            kept = int(found[count]["create_revision"]) if count < len(found) else self._client.revision
            self._client.compact(kept - 1, self._deadline())
        return True

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    @property
    def _client(self) -> EtcdClient:
        client: EtcdClient | None = getattr(self._of_thread, "client", None)
        if client is None:
            client = self._of_thread.client = EtcdClient(self._address)
        return client

    def _deadline(self) -> float:
        return time.monotonic() + self._answer_s


def _number(kvs: Any) -> int:
    return int(decoded(kvs[0]["value"])) if kvs else 0


@contextlib.contextmanager
def _answers(address: StoreAddress) -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"etcd at {address} does not answer ({first_line(error)}). Start more than half of its members "
            "again, and resume from the last checkpoint with --resume."
        ) from error
