"""What workers do goes to their agent with a heartbeat, and from there in notes that readers find at once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from swift_ft.coordination.agent_channel import AgentChannel, channel_pair, receive
from swift_ft.coordination.progress import STANDS, ProgressBoard, ProgressReader, places_of, progress_key
from swift_ft.coordination.relay.notes import MOST_KEYS, Notes, write_notes
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


class CountingStore(RendezvousStore):
    """A store in this process that counts the exchanges."""

    def __init__(self) -> None:
        held = HashStore()
        super().__init__(lambda: held)
        self.calls: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.calls[key] += 1
        super().set(key, value)

    def check(self, keys: object) -> bool:
        self.calls["check"] += 1
        return super().check(keys)  # type: ignore[arg-type]  # a sequence of keys

    def multi_get(self, keys: object) -> list[bytes]:
        self.calls["multi_get"] += 1
        return super().multi_get(keys)  # type: ignore[arg-type]  # as above


def show(notes: Notes, rank: int, iteration: int) -> None:
    notes.put(rank, {progress_key(rank): {"iteration": iteration, "mode": "live"}})


def test_a_job_of_heads_has_one_key_for_each_group_of_machines() -> None:
    store, notes = CountingStore(), Notes()
    for rank in range(100):
        show(notes, rank, 7)
    write_notes(store, notes, notes.take(), machines=100)
    assert store.calls == {f"notes/group/{group}": 1 for group in range(4)}
    store.calls.clear()
    reader = ProgressReader(store)
    assert {rank: facts["iteration"] for rank, facts in reader.read(100).items()} == dict.fromkeys(
        range(100), 7
    )
    assert store.calls == {"check": 1, "multi_get": 1}
    assert len(reader.read(100)) == 100
    assert store.calls == {"check": 1, "multi_get": 2}


def test_late_workers_have_said_where_they_stand() -> None:
    stand = {
        "place": "at data.py:12 (load), in socket.recv",
        "stack": ["data.py:12 (load)", "train.py:31 (main)"],
    }
    progress: dict[int, dict[str, Any]] = {
        0: {"mode": "live"},
        1: {"mode": "live", STANDS: stand},
        2: {STANDS: {**stand, "stack": []}},
    }
    assert places_of([0, 1, 3], progress) == (
        "worker 1 is at data.py:12 (load), in socket.recv < train.py:31 (main)",
    )
    assert places_of([2], progress) == ("worker 2 is at data.py:12 (load), in socket.recv",)


def test_a_larger_job_has_no_more_keys() -> None:
    store, notes = CountingStore(), Notes()
    for rank in range(16_384):
        show(notes, rank, 7)
    write_notes(store, notes, notes.take(), machines=16_384)
    assert store.calls == {f"notes/group/{group}": 1 for group in range(MOST_KEYS)}
    assert sorted(ProgressReader(store).read(16_384)) == list(range(16_384))
    store.calls.clear()
    show(notes, 16_383, 8)
    write_notes(store, notes, notes.take(), machines=16_384)
    assert store.calls == {f"notes/group/{MOST_KEYS - 1}": 1}
    assert ProgressReader(store).read(16_384)[16_383]["iteration"] == 8


@pytest.mark.parametrize("machines", [33, 2047, 2048, 2049, 5000])
def test_all_notes_are_found_in_a_job_of_any_size(machines: int) -> None:
    store, notes = CountingStore(), Notes()
    for rank in range(machines):
        show(notes, rank, 7)
    write_notes(store, notes, notes.take(), machines=machines)
    assert len(store.calls) <= MOST_KEYS
    assert sorted(ProgressReader(store).read(machines)) == list(range(machines))


def test_only_groups_in_which_something_changed_are_written() -> None:
    store, notes = CountingStore(), Notes()
    for rank in range(100):
        show(notes, rank, 7)
    write_notes(store, notes, notes.take(), machines=100)
    store.calls.clear()
    show(notes, 40, 8)
    notes.put_new(70, progress_key(70), {"iteration": 7, "mode": "live"})  # as before
    write_notes(store, notes, notes.take(), machines=100)
    assert store.calls == {"notes/group/1": 1}
    assert ProgressReader(store).read(100)[40]["iteration"] == 8


def test_machines_without_heads_write_keys_of_their_own_and_are_found_whenever_they_begin() -> None:
    store, notes = CountingStore(), Notes()
    reader = ProgressReader(store)
    assert reader.read(3) == {}
    show(notes, 1, 5)
    write_notes(store, notes, notes.take(), machines=3)
    assert sorted(reader.read(3)) == [1]
    show(notes, 0, 4)
    write_notes(store, notes, notes.take(), machines=3)
    assert {rank: facts["iteration"] for rank, facts in reader.read(3).items()} == {0: 4, 1: 5}
    assert {key for key in store.calls if key.startswith("notes")} == {"notes/slot/0", "notes/slot/1"}


def test_a_worker_tells_its_agent_with_a_heartbeat_and_at_once_in_another_mode() -> None:
    agent, worker = channel_pair()
    agent.settimeout(30)
    lost = threading.Event()
    channel = AgentChannel(worker, beat_s=3600, on_agent_lost=lost.set)
    board = ProgressBoard(channel, ProgressReader(CountingStore()), 7)
    board.publish(3, "live", own_s=0.5)
    message = receive(agent)
    assert message is not None
    assert message["shown"]["rank"] == 7
    assert message["shown"]["facts"].items() >= {"iteration": 3, "mode": "live", "own_s": 0.5}.items()
    board.publish(4, "live")  # this waits for the next heartbeat
    board.publish(4, "waiting")
    message = receive(agent)
    assert message is not None
    assert message["shown"]["facts"]["mode"] == "waiting"
    agent.close()
    assert lost.wait(30)
    worker.close()
