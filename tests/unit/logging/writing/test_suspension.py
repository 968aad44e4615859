"""A log that cannot be written has one gap, and is whole from a known iteration on."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.logging import LogBudget, LogOptions, LogReader, LogWriter
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.store import Store
from swift_ft.storage.store_errors import StoreGoneError
from tests.support.log import LOG, RUN, identity, key


class FailingStore(Store):
    """A disk that answers with an error while there is one; it can also hang."""

    error: OSError | None = None
    gate: threading.Event | None = None

    def open_write(self, path: str) -> AtomicFile:
        if self.gate is not None:
            self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return super().open_write(path)

    def at_once(self) -> Store:
        return self


class Suspensions:
    """What a writer has said, and events to wait for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.resumed_at: list[int] = []
        self.suspended, self.resumed = threading.Event(), threading.Event()

    def begin(self, reason: str) -> None:
        self.reasons.append(reason)
        self.suspended.set()

    def end(self, iteration: int) -> None:
        self.resumed_at.append(iteration)
        self.resumed.set()


def writer_for(store: Store, said: Suspensions, **options: float) -> LogWriter:
    log_options = LogOptions(LogBudget(100_000), outage_patience_s=0.0, **options)  # type: ignore[arg-type]
    return LogWriter(
        store, LOG, identity(), log_options, on_suspended=said.begin, on_resumed=said.end, lazy=False
    )


def send(writer: LogWriter, iteration: int) -> None:
    for microbatch in range(2):
        writer.append_message(key(iteration, microbatch), torch.full((100,), float(iteration)))


def iterations_of(store: Store) -> list[int]:
    log = LogReader(store, [LOG], run_id=RUN)
    log.refresh()
    return [i for i in range(1000) if log.has(key(i)) and log.has(key(i, 1))]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES, errno.ENOENT]
)
def test_training_goes_on_and_the_log_is_whole_from_the_next_iteration_on(
    number: int, tmp_path: Path
) -> None:
    store, said = FailingStore(str(tmp_path)), Suspensions()
    writer = writer_for(store, said)
    send(writer, 0)
    writer.flush(60)
    store.error = OSError(number, os.strerror(number))
    send(writer, 1)
    assert said.suspended.wait(60)
    assert os.strerror(number) in said.reasons[0]
    send(writer, 2)
    writer.flush(60)  # nothing to wait for
    writer.append_message(key(3, 0), torch.zeros(100))
    store.error = None
    assert said.resumed.wait(60)
    writer.append_message(key(3, 1), torch.zeros(100))  # still in the gap
    send(writer, 4)
    send(writer, 5)
    writer.close(60)
    assert said.resumed_at == [4]
    assert writer.gap.whole_from == 4
    assert len(said.reasons) == 1
    assert iterations_of(store) == [4, 5]
    assert not [name for name in store.list(LOG) if name.endswith(".tmp")]


def test_a_store_that_hangs_holds_training_back_only_for_a_while(tmp_path: Path) -> None:
    store, said = FailingStore(str(tmp_path)), Suspensions()
    store.gate = threading.Event()
    writer = writer_for(store, said, stall_timeout_s=0.1)
    for iteration in range(3):
        writer.append_message(key(iteration), torch.zeros(20_000))  # 80 kB of the 100 kB of memory
    assert "had no room for another message within 0.1 s" in said.reasons[0]
    store.gate.set()
    assert said.resumed.wait(60)
    send(writer, 3)
    writer.close(60)
    assert iterations_of(store) == [3]


def test_a_budget_that_stays_used_up_suspends_the_log(tmp_path: Path) -> None:
    """No checkpoint was committed in time. What is logged cannot be used any more, and makes room."""
    store, said = Store(str(tmp_path)), Suspensions()
    options = LogOptions(LogBudget(disk_bytes=150_000), stall_timeout_s=0.0)
    writer = LogWriter(store, LOG, identity(), options, on_suspended=said.begin, on_resumed=said.end)
    iteration = 0
    while not said.suspended.is_set():
        writer.append_message(key(iteration), torch.zeros(10_000))
        iteration += 1
    assert "used up its 150000 bytes" in said.reasons[0]
    assert said.resumed.wait(60)
    send(writer, iteration)
    writer.close(60)
    assert iterations_of(store) == [iteration]


def test_released_memory_is_given_back(tmp_path: Path) -> None:
    """Page-locked buffers wait for their message to be written, or to be dropped."""
    store, said = FailingStore(str(tmp_path)), Suspensions()
    store.error = OSError(errno.ENOSPC, "full")
    writer = writer_for(store, said)
    released = [threading.Event() for _ in range(3)]
    for microbatch, event in enumerate(released):
        writer.append_message(key(0, microbatch), torch.zeros(100), event.set)
    assert all(event.wait(60) for event in released)
    writer.close(60)


def test_a_mistake_of_the_caller_is_no_outage(tmp_path: Path) -> None:
    store, said = FailingStore(str(tmp_path)), Suspensions()
    store.gate = threading.Event()
    writer = writer_for(store, said)
    tensor = torch.zeros(100)
    writer.append_message(key(0), tensor)
    tensor.add_(1.0)
    store.gate.set()
    with pytest.raises(UsageError, match="changed in place"):
        writer.flush(60)
    assert not said.reasons


# ------------------------------------------------------------------------------- a store that is gone


@pytest.fixture
def mounted(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "store"), patience_s=0.0)
    store.write_json("run.json", {"run_id": "a"})
    store.anchor("run.json")
    return store


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_nothing_is_read_or_written_in_the_place_of_a_lost_mount(
    left: str, mounted: Store, tmp_path: Path
) -> None:
    place, away = tmp_path / "store", tmp_path / "away"
    place.rename(away)
    if left != "nothing":
        place.mkdir()
    for use in (
        lambda: mounted.list("log"),
        lambda: mounted.exists("checkpoints"),
        lambda: mounted.read_json("run.json"),
        lambda: mounted.write_json("claim.json", {}),
        lambda: mounted.open_write("log/segment"),
        lambda: mounted.open_read("log/segment"),
        lambda: mounted.delete("log/segment"),
    ):
        with pytest.raises(StoreGoneError, match=r"run\.json is missing"):
            use()
    assert not [*place.iterdir()] if left != "nothing" else not place.exists()
    if left != "nothing":
        place.rmdir()
    away.rename(place)
    assert mounted.list("") == ["run.json"]


def test_a_store_that_comes_back_was_never_away(mounted: Store, tmp_path: Path) -> None:
    patient = Store(str(tmp_path / "store"), patience_s=60.0)
    patient.anchor("run.json")
    (tmp_path / "store").rename(tmp_path / "away")
    written = threading.Event()

    def write() -> None:
        patient.write_json("claim.json", {"by": "me"})
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not written.wait(0.3)
    (tmp_path / "away").rename(tmp_path / "store")
    assert written.wait(60)
    thread.join()
    assert mounted.read_json("claim.json") == {"by": "me"}
