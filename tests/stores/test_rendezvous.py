"""The embedded rendezvous store and etcd do the same for a job."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import DistError

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.store_client import connect as connect_to
from swift_ft.torch_adapters.rendezvous_store import PrefixStore, RendezvousStore
from tests.support.store_processes import store_process

_LONG = timedelta(seconds=60)
_SHORT = timedelta(milliseconds=300)
_THREADS = 8

Connect = Callable[[str], RendezvousStore]
"""Opens a client that is confined to the names of one run."""


class OfStore:
    """What each does. Those that derive from it have a fixture ``connect``, which opens clients of a run."""

    @pytest.fixture
    def run(self) -> str:
        """The name of a run that has no keys."""
        return f"run-{uuid.uuid4().hex}"

    @pytest.fixture
    def store(self, connect: Connect, run: str) -> RendezvousStore:
        """A client, in a run without keys."""
        return connect(run)

    # ----------------------------------------------------------------------------------------------- keys

    def test_what_is_set_is_read_by_all(self, connect: Connect, run: str, store: RendezvousStore) -> None:
        store.set("key", "first")
        store.set("key", "value: ü")
        assert store.get("key") == "value: ü".encode()
        assert connect(run).get("key") == "value: ü".encode()

    def test_an_empty_value_is_a_value(self, store: RendezvousStore) -> None:
        store.set("key", "")
        assert store.check(["key"])
        assert store.get("key") == b""

    def test_runs_do_not_see_each_others_keys(self, connect: Connect, run: str) -> None:
        """Not even where one name begins with another."""
        connect(run).set("key", "value")
        assert not connect(f"{run}0").check(["key"])
        assert not connect(run[:-1]).check(["key"])

    def test_several_are_checked_and_read_at_once(self, store: RendezvousStore) -> None:
        keys = [f"key/{number}" for number in range(250)]
        for key in keys:
            store.set(key, key)
        assert store.check(keys)
        assert not store.check([*keys, "key"])
        assert store.multi_get(keys) == [key.encode() for key in keys]
        assert store.multi_get([]) == []

    def test_a_deleted_key_is_gone(self, store: RendezvousStore) -> None:
        store.set("key", "value")
        assert store.delete_key("key") is True
        assert not store.check(["key"])
        assert store.delete_key("key") is False

    def test_a_large_value_is_kept_whole(self, store: RendezvousStore) -> None:
        value = "0123456789abcdef" * (256 << 6)  # 256 KiB
        store.set("key", value)
        assert store.get("key").decode() == value

    # -------------------------------------------------------------------------------------------- decisions

    def test_compare_set_decides(self, store: RendezvousStore) -> None:
        """An empty expectation stands for a key that is not set, or is empty."""
        assert store.compare_set("key", "", "one") == b"one"
        assert store.compare_set("key", "", "two") == b"one"
        assert store.compare_set("key", "two", "three") == b"one"
        assert store.compare_set("key", "one", "two") == b"two"
        assert store.get("key") == b"two"
        assert store.compare_set("absent", "one", "two") == b"one"  # as torch's store
        assert not store.check(["absent"])
        store.set("empty", "")
        assert store.compare_set("empty", "", "one") == b"one"

    def test_one_of_many_wins(self, connect: Connect, run: str) -> None:
        def claim(name: int) -> bytes:
            return connect(run).compare_set("winner", "", str(name))

        with ThreadPoolExecutor(_THREADS) as pool:
            answers = set(pool.map(claim, range(2 * _THREADS)))
        assert answers == {connect(run).get("winner")}

    def test_no_addition_is_lost(self, connect: Connect, run: str) -> None:
        def add(amount: int) -> list[int]:
            client = connect(run)
            return [client.add("sum", amount) for _ in range(5)]

        with ThreadPoolExecutor(_THREADS) as pool:
            sums = [found for all_found in pool.map(add, [1] * _THREADS) for found in all_found]
        assert sorted(sums) == list(range(1, 5 * _THREADS + 1))  # each of them was seen by one
        assert connect(run).add("sum", -3) == 5 * _THREADS - 3
        assert connect(run).get("sum") == str(5 * _THREADS - 3).encode()

    # ------------------------------------------------------------------------------------------------ waits

    def test_get_waits_for_a_key(self, connect: Connect, run: str, store: RendezvousStore) -> None:
        store.set_timeout(_LONG)
        self._set_later(connect(run), "key", "value", begun := threading.Event())
        begun.set()
        assert store.get("key") == b"value"

    def test_wait_is_for_all_keys(self, connect: Connect, run: str, store: RendezvousStore) -> None:
        store.set("one", "")
        with pytest.raises(DistError):
            store.wait(["one", "two"], _SHORT)
        self._set_later(connect(run), "two", "", begun := threading.Event())
        begun.set()
        store.wait(["one", "two"], _LONG)

    def test_multi_get_waits_for_all_keys(self, connect: Connect, run: str, store: RendezvousStore) -> None:
        store.set_timeout(_LONG)
        store.set("one", "1")
        self._set_later(connect(run), "two", "2", begun := threading.Event())
        begun.set()
        assert store.multi_get(["one", "two"]) == [b"1", b"2"]

    def test_a_wait_ends_at_its_deadline(self, store: RendezvousStore) -> None:
        began = time.monotonic()
        with pytest.raises(DistError):
            store.wait(["never"], _SHORT)
        assert time.monotonic() - began >= _SHORT.total_seconds()
        store.set_timeout(_SHORT)
        with pytest.raises(DistError):
            store.get("never")
        store.set("key", "value")  # it can still be used
        assert store.get("key") == b"value"

    def test_a_key_that_was_deleted_is_waited_for_again(
        self, connect: Connect, run: str, store: RendezvousStore
    ) -> None:
        store.set("key", "old")
        store.delete_key("key")
        self._set_later(connect(run), "key", "new", begun := threading.Event())
        begun.set()
        store.wait(["key"], _LONG)
        assert store.get("key") == b"new"

    def test_a_wait_does_not_hold_up_other_threads(self, store: RendezvousStore) -> None:
        """One client, many threads that wait, and one that ends their waits."""
        store.set_timeout(_LONG)
        with ThreadPoolExecutor(_THREADS) as pool:
            waiting = [pool.submit(store.get, f"key/{number}") for number in range(_THREADS)]
            for number in range(_THREADS):
                store.set(f"key/{number}", str(number))
            values = [future.result(_LONG.total_seconds()) for future in waiting]
        assert values == [str(number).encode() for number in range(_THREADS)]

    # ------------------------------------------------------------------------------------ for process groups

    def test_a_connection_of_its_own_sees_the_same_keys(self, store: RendezvousStore) -> None:
        """As a process group has it, and through torch's C++."""
        store.set("group/ours", "1")
        connection = store.connection()
        group: Any = PrefixStore("group", connection)  # torch leaves methods out of its stubs
        group.set_timeout(_LONG)
        assert group.get("ours") == b"1"
        group.set("theirs", "2")
        assert group.check(["ours", "theirs"])
        assert group.add("sum", 2) == 2
        assert group.compare_set("claim", "", "3") == b"3"
        assert group.delete_key("claim")
        group.append("text", "a")
        group.append("text", "b")
        assert group.get("text") == b"ab"
        group.multi_set(["x", "y"], ["4", "5"])
        assert group.multi_get(["x", "y"]) == [b"4", b"5"]
        group.wait(["x", "y"])
        with pytest.raises(DistError):
            group.wait(["never"], _SHORT)
        assert store.get("group/theirs") == b"2"

    def _set_later(self, client: RendezvousStore, key: str, value: str, begun: threading.Event) -> None:
        """Set a key in another thread, about when this one begins to wait."""

        def set_it() -> None:
            begun.wait(_LONG.total_seconds())
            client.set(key, value)

        threading.Thread(target=set_it, daemon=True).start()


class TestEmbedded(OfStore):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with store_process() as service:
            yield partial(connect_to, service.address)


class TestEtcd(OfStore):
    @pytest.fixture
    def connect(self, etcd: EtcdCluster) -> Connect:
        return partial(connect_to, StoreAddress.etcd(etcd.endpoints))
