"""From messages to the log: at once from the host, in bubbles from a device; and what that cost."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from swift_ft.errors import UnsupportedError
from swift_ft.logging import (
    IterationStats,
    LogBudget,
    LogOptions,
    LogReader,
    LogStats,
    LogTimeoutError,
    LogWriter,
    MessageLog,
    checksum_of,
)
from swift_ft.logging.writing.message_log import device_of
from swift_ft.storage.store import Store
from tests.support.fake_device import FakeDevice
from tests.support.log import LOG, RUN, identity, key, read_all
from tests.support.waiting import wait_until
from tests.unit.logging.writing.test_suspension import FailingStore, Suspensions, iterations_of


def log_of(store: Store) -> LogReader:
    reader = LogReader(store, [LOG], run_id=RUN)
    reader.refresh()
    return reader


def chosen(device: FakeDevice | None, tensor: torch.Tensor) -> FakeDevice | None:
    """The device, whatever the tensor."""
    return device


def test_a_device_and_a_host_log_the_same(store: Store) -> None:
    """One iteration of a stage: two messages in, two out; each way of logging in its own directory."""
    device = FakeDevice(copy_s=0.1)
    logs = {}
    for name, way in (("host", None), ("device", device)):
        stats = LogStats()
        log = MessageLog(LogOptions(), stats, device_of=partial(chosen, way), clock=device.clock)
        log.writer = LogWriter(store, f"log/{name}", identity(), stats=stats, lazy=True)
        for microbatch in range(2):
            log.bubble_begins()
            device.advance(1)
            arrived = torch.full((3,), float(microbatch))
            log.overwriting(arrived)
            log.bubble_ends()
            log.received(key(0, microbatch, source_stage=0, destination_stage=1), arrived)
            log.sent(key(0, microbatch, source_stage=1, destination_stage=2), arrived + 10)
        log.end_iteration()
        device.advance(1)
        log.drain(60)
        log.writer.close(60)
        reader = LogReader(store, [f"log/{name}"], run_id=RUN)
        reader.refresh()
        messages = [(sent, tensor.tolist()) for sent, tensor in read_all(reader, 0).items()]
        receipts = [reader.receipt(key(0, i, source_stage=0, destination_stage=1)) for i in range(2)]
        logs[name] = messages, receipts
        assert (stats.last.messages, stats.last.bytes) == (2, 24)
        assert stats.total.bubble_s == 2.0
    assert logs["host"] == logs["device"]
    assert logs["host"][1] == [checksum_of(torch.full((3,), float(i))) for i in range(2)]


def test_a_lazy_writer_sleeps_until_the_bubble(store: Store) -> None:
    log = MessageLog(LogOptions(), LogStats())
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    log.sent(key(0), torch.ones(3))
    assert log.writer.metrics().records == 0
    log.bubble_begins()
    log.writer.roll()
    log.writer.flush(60)
    assert log.writer.metrics().records == 1
    log.sent(key(1), torch.ones(3))
    log.writer.close(60)
    assert log_of(store).has(key(1))


class Wakes:
    """A log whose writer notes when it is woken, in place of writing."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = MessageLog(LogOptions(), LogStats())
        self.writer = self.log.writer = LogWriter(store, LOG, identity(), lazy=True)
        self.count = 0
        monkeypatch.setattr(self.writer, "_wake", self._woken)

    def _woken(self) -> None:
        self.count += 1

    def step(self, iteration: int, bubbles: int, floats: int = 3) -> list[int]:
        """How often it has been woken after each bubble, which a message precedes, and after the end."""
        self.log.begin_iteration()
        self.log.sent(key(iteration, 0), torch.ones(3))
        counts = []
        for microbatch in range(1, bubbles + 1):
            self.log.bubble_begins()
            counts.append(self.count)
            self.log.bubble_ends()
            self.log.sent(key(iteration, microbatch), torch.ones(floats))
        self.log.end_iteration()
        return [*counts, self.count]


def test_the_rest_of_a_step_is_written_in_the_first_bubble_of_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step computes as it begins. Only its waits leave the interpreter to the writer."""
    wakes = Wakes(store, monkeypatch)
    assert wakes.step(0, bubbles=2) == [0, 0, 0]
    assert wakes.step(1, bubbles=2) == [1, 1, 1]
    monkeypatch.undo()
    wakes.writer.close(60)
    log = log_of(store)
    assert [log.has(key(iteration, i)) for iteration in range(2) for i in range(3)] == [True] * 6


def test_a_step_that_never_waits_has_its_messages_written_as_it_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes = Wakes(store, monkeypatch)
    assert wakes.step(0, bubbles=0) == [1]
    assert wakes.step(1, bubbles=1) == [1, 1]
    assert wakes.step(2, bubbles=0) == [2]  # with what the step before has left
    assert wakes.step(3, bubbles=1) == [2, 2]
    monkeypatch.undo()
    wakes.writer.close(60)


def test_much_to_write_is_written_in_each_bubble(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = Wakes(store, monkeypatch)
    assert wakes.step(0, bubbles=3, floats=2**18) == [0, 1, 2, 2]
    assert wakes.step(1, bubbles=1) == [3, 3]
    monkeypatch.undo()
    wakes.writer.close(60)


@pytest.mark.parametrize("how", ["flush", "close", "roll"])
def test_what_is_left_is_written_before_the_next_bubble_where_it_is_asked_for(how: str, store: Store) -> None:
    log = MessageLog(LogOptions(), LogStats())
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    log.bubble_begins()
    log.bubble_ends()
    log.sent(key(0), torch.ones(3))
    log.end_iteration()
    if how == "roll":
        log.writer.roll()
        wait_until(lambda: log_of(store).has(key(0)), "the segment to be committed")
    elif how == "flush":
        log.writer.flush(60)
    else:
        log.writer.close(60)
    assert log_of(store).has(key(0))
    log.writer.close(60)


def test_a_lazy_writer_is_woken_when_half_of_the_memory_is_used(url: str) -> None:
    """Otherwise it would sleep while senders wait."""
    from swift_ft.logging import LogBudget
    from tests.support.log import BlockedStore

    store = BlockedStore(url)
    writer = LogWriter(store, LOG, identity(), LogOptions(LogBudget(800)), lazy=True)
    writer.append_message(key(0), torch.ones(50))
    writer.append_message(key(1), torch.ones(50))
    assert store.waiting.wait(60)  # the thread writes the first one
    store.gate.set()
    writer.close(60)


def test_where_messages_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(torch.device("cpu")) is None
    with pytest.raises(UnsupportedError, match="Messages on mps cannot be logged"):
        device_of(torch.device("mps"))


def test_stats_add_up() -> None:
    stats = LogStats()
    stats.add(IterationStats(1, 10, 0.5, queue_high_water_bytes=7))
    stats.add(IterationStats(1, 20, 0.25, 0.1, 0.2, 0.3, 5, 9))
    first = stats.end_iteration()
    assert first == IterationStats(2, 30, 0.75, 0.1, 0.2, 0.3, 7, 9)
    stats.add(IterationStats(1, 1, queue_high_water_bytes=1))
    assert stats.last == first
    assert stats.total == IterationStats(3, 31, 0.75, 0.1, 0.2, 0.3, 7, 9)
    assert stats.total_bytes == 31
    assert stats.end_iteration() == IterationStats(1, 1, queue_high_water_bytes=1)
    assert stats.largest_bytes == 30
    stats.logged(100)
    stats.add(IterationStats(bytes=1000))
    assert stats.total_bytes == stats.total.bytes == 1131


def test_a_store_that_hangs_leaves_a_gap_in_the_log_of_a_device(tmp_path: Path) -> None:
    """Training goes on without its log, as with messages of the host; no later iteration waits again."""
    store, said, device = FailingStore(str(tmp_path)), Suspensions(), FakeDevice(copy_s=0.0)
    options = LogOptions(LogBudget(1024), stall_timeout_s=0.2, outage_patience_s=0.0)
    log = MessageLog(options, LogStats(), device_of=partial(chosen, device))
    log.writer = LogWriter(
        store, LOG, identity(), options, on_suspended=said.begin, on_resumed=said.end, lazy=True
    )
    store.gate = threading.Event()
    held_back: list[float] = []
    for iteration in range(4):
        for microbatch in range(3):
            log.sent(key(iteration, microbatch), torch.full((100,), float(iteration)))  # 2 of them fit
        held_back.append(log.end_iteration().held_back_s)
    assert "bytes of page-locked memory wait to be written" in said.reasons[0]
    assert len(said.reasons) == 1
    assert held_back[0] > 0.1
    assert held_back[1:] == [0.0] * 3
    store.gate.set()
    assert said.resumed.wait(60)
    for microbatch in range(3):
        log.sent(key(4, microbatch), torch.full((100,), 4.0))
    log.end_iteration()
    log.drain(60)
    log.writer.close(60)
    assert said.resumed_at == [4]
    assert iterations_of(store) == [4]


def test_what_was_not_copied_in_time_is_in_no_later_log(store: Store) -> None:
    device = FakeDevice(copy_s=100.0)
    log = MessageLog(LogOptions(), LogStats(), device_of=partial(chosen, device), clock=device.clock)
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    log.sent(key(0), torch.ones(3))
    log.end_iteration()  # its copy has begun
    log.sent(key(1), torch.ones(3))
    with pytest.raises(LogTimeoutError):
        log.drain(-1.0)
    log.writer.close(60)
    log.writer = LogWriter(store, LOG, identity(generation=2), lazy=True)
    device.advance(1000)
    log.sent(key(2), torch.ones(3))
    log.end_iteration()
    device.advance(1000)
    log.drain(60)
    log.writer.close(60)
    reader = log_of(store)
    assert [reader.has(key(iteration)) for iteration in range(3)] == [False, False, True]


def test_what_an_abort_has_changed_is_in_no_log(store: Store) -> None:
    """Over NCCL the device runs on with what an abort has left, and so do the copies of it.

    The iteration is repeated in the next generation, and then both copies would differ.
    """
    device, aborted = FakeDevice(copy_s=1.0), threading.Event()
    log = MessageLog(
        LogOptions(),
        LogStats(),
        device_of=partial(chosen, device),
        clock=device.clock,
        in_doubt=aborted.is_set,
    )
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    arriving, computed = torch.full((3,), 5.0), torch.full((3,), 6.0)
    log.sent(key(4, 0), torch.full((3,), 1.0))
    log.bubble_begins()
    device.advance(10)
    log.bubble_ends()  # that one was copied before
    log.received(key(4, 0, source_stage=1, destination_stage=0), arriving)
    log.sent(key(4, 1), computed)
    log.bubble_begins()  # these are being copied
    aborted.set()
    for tensor in (arriving, computed):
        tensor.data.fill_(-1.0)  # as a device writes: torch's counter does not know
    log.bubble_ends()
    log.received(key(4, 1, source_stage=1, destination_stage=0), arriving)
    log.sent(key(4, 2), torch.full((3,), -2.0))
    log.interrupted()
    device.advance(10)
    log.drain(60)
    log.writer.close(60)
    reader = log_of(store)
    assert [reader.has(key(4, microbatch)) for microbatch in range(3)] == [True, False, False]
    assert reader.receipt(key(4, 0, source_stage=1, destination_stage=0)) is None

    aborted.clear()  # the next generation has another group
    log.writer = LogWriter(store, LOG, identity(generation=1), lazy=True)
    for microbatch in range(3):
        log.sent(key(4, microbatch), torch.full((3,), 1.0 + microbatch))
    log.end_iteration()
    device.advance(10)
    log.drain(60)
    log.writer.close(60)
    reader = log_of(store)
    assert [reader.read(key(4, i)).tolist() for i in range(3)] == [[1.0 + i] * 3 for i in range(3)]


def test_nor_what_the_host_has_read_of_it(store: Store) -> None:
    """Where operations are on the host, and their waits do not say that they were aborted."""
    aborted = threading.Event()
    log = MessageLog(LogOptions(), LogStats(), in_doubt=aborted.is_set)
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    log.sent(key(0, 0), torch.ones(3))
    aborted.set()
    log.sent(key(0, 1), torch.ones(3))
    log.received(key(0, 0, source_stage=1, destination_stage=0), torch.ones(3))
    log.interrupted()
    log.writer.close(60)
    reader = log_of(store)
    assert [reader.has(key(0, microbatch)) for microbatch in range(2)] == [True, False]
    assert reader.receipt(key(0, 0, source_stage=1, destination_stage=0)) is None
