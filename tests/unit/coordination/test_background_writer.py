"""Writes that training does not wait for: in order, and only the newest value of each key."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.waiting import wait_until


class SlowStore:
    """Notes what is written. The first write waits until the test lets it go on."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, str | None]] = []
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))

    def set(self, key: str, value: str) -> None:
        self._note(key, value)

    def delete_key(self, key: str) -> None:
        self._note(key, None)

    def _note(self, key: str, value: str | None) -> None:
        self.writes.append((key, value))
        self.begun.set()
        assert self.go_on.wait(30)
        if key == "last":
            self.ended.set()


def test_only_the_newest_value_of_each_key_is_written() -> None:
    store = SlowStore()
    writer = BackgroundWriter(cast(RendezvousStore, store))
    writer.set("a", "1")
    assert store.begun.wait(30)
    for number in range(2, 5):
        writer.set("a", str(number))  # none of these waits for the first one
    writer.set("b", "1")
    writer.delete("c")
    writer.set("b", "2")
    writer.set("last", "")
    store.go_on.set()
    assert store.ended.wait(30)
    assert writer.flush(30)
    assert store.writes == [("a", "1"), ("a", "4"), ("c", None), ("b", "2"), ("last", "")]


def test_json_is_made_in_the_writers_thread_and_only_of_the_newest_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step adds to a value that grows, and would turn all of it into JSON each time."""
    made: list[tuple[object, str]] = []

    def dumps(value: object) -> str:
        made.append((value, threading.current_thread().name))
        return json.dumps(value)

    monkeypatch.setattr("swift_ft.coordination.background_writer.json", SimpleNamespace(dumps=dumps))
    store = SlowStore()
    writer = BackgroundWriter(cast(RendezvousStore, store))
    writer.set("first", "")
    assert store.begun.wait(30)
    for count in range(3):
        writer.set_json("a", {"0": ("digest",) * count})
    assert not made
    store.go_on.set()
    assert writer.flush(30)
    assert store.writes == [("first", ""), ("a", '{"0": ["digest", "digest"]}')]
    assert made == [({"0": ("digest", "digest")}, "swift-background-writer")]


def test_errands_are_done_in_order_and_waited_for() -> None:
    store = SlowStore()
    writer = BackgroundWriter(cast(RendezvousStore, store))
    writer.set("a", "1")
    writer.do(lambda: store.writes.append(("an errand", None)))
    writer.set("b", "1")
    assert not writer.flush(0.01), "the first write has not ended"
    store.go_on.set()
    assert writer.flush(30)
    assert store.writes == [("a", "1"), ("an errand", None), ("b", "1")]
    assert writer.flush(0.0), "nothing is left to do"


def test_an_errand_that_fails_is_logged_and_the_next_one_done(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore()
    store.go_on.set()
    writer = BackgroundWriter(cast(RendezvousStore, store))
    writer.do(lambda: [][1])
    writer.set("a", "1")
    assert writer.flush(30)
    assert store.writes == [("a", "1")]
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["errand_failed"]


def test_a_store_that_is_back_gets_all_that_it_had_not_taken() -> None:
    class Lost(SlowStore):
        def _note(self, key: str, value: str | None) -> None:
            if not self.go_on.is_set():
                self.begun.set()
                raise RuntimeError("Connection reset by peer")
            super()._note(key, value)

    store = Lost()
    writer = BackgroundWriter(cast(RendezvousStore, store))
    writer.set("a", "1")
    assert store.begun.wait(30)
    writer.set("a", "2")
    writer.set("b", "1")
    assert not writer.flush(30), "it is lost"
    assert writer.lost
    store.go_on.set()
    wait_until(lambda: not writer.lost, "the store to be found again")
    assert writer.flush(30)
    assert store.writes == [("a", "1"), ("a", "2"), ("b", "1")]
