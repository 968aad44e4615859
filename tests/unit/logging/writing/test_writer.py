from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from swift_ft.errors import SwiftError, UnsupportedError, UsageError
from swift_ft.logging import LogBudget, LogOptions, LogReader, LogStats, LogWriter, checksum_of, read_segment
from swift_ft.logging.format.record import RecordKind
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.store import Store
from tests.support.log import (
    LOG,
    RUN,
    BlockedStore,
    FullStore,
    identity,
    key,
    message,
    read_all,
    write_segment,
)


def writer_for(
    store: Store,
    *,
    budget_bytes: int = 256 << 20,
    segment_bytes: int = 64 << 20,
    stall_timeout_s: float = 600.0,
    outage_patience_s: float = 0.0,
    **parts: Any,
) -> LogWriter:
    options = LogOptions(
        LogBudget(budget_bytes), segment_bytes, stall_timeout_s, outage_patience_s=outage_patience_s
    )
    return LogWriter(store, LOG, identity(generation=1), options, **parts)


def log_of(store: Store) -> LogReader:
    reader = LogReader(store, [LOG], run_id=RUN)
    reader.refresh()
    return reader


def test_appended_messages_can_be_read_after_flush(store: Store) -> None:
    writer = writer_for(store)
    tensors = [torch.randn(3, i) for i in range(5)]
    for i, tensor in enumerate(tensors):
        writer.append_message(key(0, i), tensor)
    writer.append_receipt(key(0, 0, source_stage=3), 77, "float32", (3, 4))
    writer.flush(60)
    log = log_of(store)
    assert [checksum_of(read) for read in read_all(log, 0).values()] == [checksum_of(t) for t in tensors]
    assert log.receipt(key(0, 0, source_stage=3)) == 77
    writer.close(60)


def test_roll_ends_a_segment_and_close_commits_the_rest(store: Store) -> None:
    writer = writer_for(store)
    for iteration in range(3):
        writer.append_message(key(iteration), torch.zeros(2))
        writer.roll()
        writer.roll()  # nothing in between: no empty segment
    writer.append_message(key(3), torch.zeros(2))
    writer.close(60)
    assert store.list(LOG) == [f"g00001-s{i:06d}-i{i:08d}-{i:08d}.arrow" for i in range(4)]


def test_a_full_segment_is_closed(store: Store) -> None:
    writer = writer_for(store, segment_bytes=10_000)
    for i in range(6):
        writer.append_message(key(i), torch.zeros(1000))
    writer.close(60)
    sizes = [store.size(f"{LOG}/{name}") for name in store.list(LOG)]
    assert writer.metrics().segments == len(sizes) > 1
    assert all(10_000 <= size < 20_000 for size in sizes[:-1])


def test_metrics_count_what_is_in_the_store(store: Store) -> None:
    writer = writer_for(store)
    for i in range(3):
        writer.append_message(key(i), torch.zeros(100))
    writer.append_receipt(key(0, 1), 1, "float32", (2,))
    writer.flush(60)
    metrics = writer.metrics()
    assert metrics.records == 4
    assert metrics.segments == 1
    assert metrics.bytes == sum(store.size(f"{LOG}/{name}") for name in store.list(LOG))
    assert metrics.disk_bytes == metrics.bytes
    assert metrics.waiting_segments == 0
    writer.close(60)


def test_the_file_is_asked_once_for_each_record_how_long_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask gives up the interpreter, and training may be about to use it."""
    asked: list[int] = []
    tell = AtomicFile.tell

    def counted(file: AtomicFile) -> int:
        asked.append(tell(file))
        return asked[-1]

    monkeypatch.setattr(AtomicFile, "tell", counted)
    writer = writer_for(store)
    for i in range(20):
        writer.append_message(key(0, i), torch.zeros(100))
        writer.append_receipt(key(1, i), 1, "float32", (2,))
    writer.close(60)
    assert len(asked) <= 40 + 3  # as the segment begins, and as it is committed
    assert writer.metrics().bytes == store.size(f"{LOG}/{store.list(LOG)[0]}")


def test_a_sender_waits_while_the_budget_is_used_up(url: str) -> None:
    """Nothing is dropped: the third message enters only after a first has left."""
    store, stats = BlockedStore(url), LogStats()
    writer = writer_for(store, budget_bytes=800, stats=stats)
    writer.append_message(key(0), torch.zeros(100))
    writer.append_message(key(1), torch.zeros(100))
    assert store.waiting.wait(60)
    entered = threading.Event()

    def third() -> None:
        writer.append_message(key(2), torch.zeros(100))
        entered.set()

    sender = threading.Thread(target=third)
    sender.start()
    assert not entered.is_set()
    assert stats.total.queue_high_water_bytes == 800
    store.gate.set()
    sender.join(60)
    assert entered.is_set()
    writer.close(60)
    assert stats.total.queue_high_water_bytes == 800
    assert [name.iteration for i in range(3) for name in read_all(log_of(store), i)] == [0, 1, 2]


def test_the_wait_is_counted(url: str) -> None:
    store = BlockedStore(url)
    ticks = iter([10.0, 12.5])

    def clock() -> float:
        # Read once before the wait and once after: the first reading unblocks the store.
        store.gate.set()
        return next(ticks)

    stats = LogStats()
    writer = writer_for(store, budget_bytes=400, clock=clock, stats=stats)
    writer.append_message(key(0), torch.zeros(100))
    writer.append_message(key(1), torch.zeros(100))
    writer.close(60)
    assert stats.total.held_back_s == 2.5


def test_a_message_larger_than_the_budget_is_admitted_alone(store: Store) -> None:
    stats = LogStats()
    writer = writer_for(store, budget_bytes=8, stats=stats)
    for i in range(3):
        writer.append_message(key(i), torch.full((100,), float(i)))
    writer.close(60)
    assert stats.total.queue_high_water_bytes == 400
    assert all(log_of(store).has(key(i)) for i in range(3))


def test_a_sender_does_not_wait_for_ever(url: str) -> None:
    store = BlockedStore(url)
    writer = writer_for(store, budget_bytes=400, stall_timeout_s=0.0)
    writer.append_message(key(0), torch.zeros(100))
    with pytest.raises(LogTimeoutError, match="no room"):
        writer.append_message(key(1), torch.zeros(100))
    store.gate.set()
    writer.close(60)


def test_flush_has_a_deadline(url: str) -> None:
    store = BlockedStore(url)
    writer = writer_for(store)
    writer.append_message(key(0), torch.zeros(100))
    with pytest.raises(TimeoutError, match="400 bytes are queued"):
        writer.flush(0.0)
    with pytest.raises(LogTimeoutError):
        writer.close(0.0)
    store.gate.set()


def test_roll_does_not_wait(url: str) -> None:
    store = BlockedStore(url)
    writer = writer_for(store)
    writer.append_message(key(0), torch.zeros(100))
    writer.roll()
    assert store.list(LOG) == []
    store.gate.set()
    writer.close(60)
    assert len(store.list(LOG)) == 1


def test_an_error_in_the_thread_reaches_every_later_call(url: str) -> None:
    writer = writer_for(FullStore(url))
    writer.append_message(key(0), torch.zeros(1))
    with pytest.raises(SwiftError, match="No space left on device") as caught:
        writer.flush(60)
    assert isinstance(caught.value.__cause__, OSError)
    for call in (
        lambda: writer.append_message(key(1), torch.zeros(1)),
        lambda: writer.append_receipt(key(1), 0, "float32", ()),
        lambda: writer.roll(),
        lambda: writer.drop_before(5),
        lambda: writer.close(60),
    ):
        with pytest.raises(SwiftError, match="No space left on device"):
            call()
    writer.close(60)


def test_an_error_frees_a_sender_that_waits(url: str) -> None:
    class FailsAfterGate(BlockedStore):
        def open_write(self, path: str) -> None:  # type: ignore[override]
            self.gate.wait(60)
            raise OSError("lost the disk")

    store = FailsAfterGate(url)
    failures: list[SwiftError] = []

    def clock() -> float:
        store.gate.set()
        return 0.0

    stats = LogStats()
    writer = writer_for(store, budget_bytes=400, clock=clock, stats=stats)
    writer.append_message(key(0), torch.zeros(100))
    try:
        writer.append_message(key(1), torch.zeros(100))
    except SwiftError as error:
        failures.append(error)
    assert "lost the disk" in str(failures[0])


def test_a_tensor_that_changes_before_it_is_written_is_an_error(url: str) -> None:
    """Its bytes are not what was sent, so they must not be in the log."""
    store = BlockedStore(url)
    writer = writer_for(store)
    tensor = torch.zeros(100)
    writer.append_message(key(3), tensor)
    tensor.add_(1.0)
    store.gate.set()
    with pytest.raises(UsageError, match=r"iteration 3.*changed in place"):
        writer.flush(60)
    assert store.list(LOG) == []


def test_a_queued_tensor_is_not_copied_and_keeps_no_graph(url: str) -> None:
    store = BlockedStore(url)
    writer = writer_for(store)
    graphs: list[weakref.ref[object]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            graphs.append(weakref.ref(ctx))
            return x * 2

    double: Any = Double.apply
    sent: torch.Tensor = double(torch.ones(3, requires_grad=True))
    assert graphs[0]() is not None
    pointer = sent.data_ptr()
    writer.append_message(key(0), sent)
    del sent
    gc.collect()
    assert graphs[0]() is None
    assert [item.tensor.data_ptr() for item in writer._queue if hasattr(item, "tensor")] in ([], [pointer])
    store.gate.set()
    writer.close(60)
    assert torch.equal(log_of(store).read(key(0)), torch.full((3,), 2.0))


def test_a_written_tensor_is_released(store: Store) -> None:
    writer = writer_for(store)
    tensor = torch.zeros(10)
    storage = weakref.ref(tensor.untyped_storage())
    writer.append_message(key(0), tensor)
    del tensor
    writer.flush(60)
    gc.collect()
    assert storage() is None
    writer.close(60)


def test_inference_tensors_can_be_logged(store: Store) -> None:
    writer = writer_for(store)
    with torch.inference_mode():
        writer.append_message(key(0), torch.ones(2))
    writer.close(60)
    assert log_of(store).has(key(0))


def test_tensors_on_a_device_are_refused(store: Store) -> None:
    writer = writer_for(store)
    with pytest.raises(UnsupportedError, match="copied to the host"):
        writer.append_message(key(0), torch.zeros(2, device="meta"))
    writer.close(60)


def test_a_closed_writer_takes_nothing(store: Store) -> None:
    writer = writer_for(store)
    writer.close(60)
    writer.close(60)
    with pytest.raises(UsageError, match="closed"):
        writer.append_message(key(0), torch.zeros(2))


def test_drop_before_deletes_whole_segments_of_any_generation(store: Store) -> None:
    """§5.1: a log is deleted when a checkpoint covers it, never before."""
    write_segment(store, [message(key(i), torch.zeros(1)) for i in (0, 1)], identity(generation=0))
    writer = writer_for(store)
    for first in (2, 4):
        for i in (first, first + 1):
            writer.append_message(key(i), torch.zeros(1))
        writer.roll()
    writer.flush(60)
    assert len(writer.drop_before(5)) == 2
    log = log_of(store)
    assert [i for i in range(6) if log.has(key(i))] == [4, 5]
    writer.append_message(key(6), torch.zeros(1))
    writer.close(60)
    assert log_of(store).has(key(6))


def test_drop_generations_before(store: Store) -> None:
    for generation in (0, 1, 2):
        write_segment(store, [message(key(generation), torch.zeros(1))], identity(generation))
    writer = LogWriter(store, LOG, identity(generation=3))
    assert len(writer.drop_generations_before(2)) == 2
    writer.close(60)
    assert [name[:6] for name in store.list(LOG)] == ["g00002"]


def test_leftovers_are_swept_and_the_sequence_goes_on(store: Store) -> None:
    path = write_segment(store, [message(key(0), torch.zeros(1))], identity(generation=1), sequence=6)
    write_segment(store, [message(key(0), torch.zeros(1))], identity(generation=0), sequence=9)
    store.open_write(f"{LOG}/g00001-s000007").sink.close()  # a writer that died
    writer = writer_for(store)
    assert len(store.list(LOG)) == 2
    writer.append_message(key(1), torch.zeros(1))
    writer.close(60)
    assert store.list(LOG)[1:] == [path.rpartition("/")[2], "g00001-s000007-i00000001-00000001.arrow"]


def test_several_threads_may_append(store: Store) -> None:
    writer = writer_for(store, budget_bytes=4000)

    def send(stage: int) -> None:
        for i in range(50):
            writer.append_message(key(0, i, source_stage=stage), torch.full((100,), float(i)))

    threads = [threading.Thread(target=send, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(60)
    log = log_of(store)
    for stage in range(4):
        assert [name.microbatch for name in log.keys(0) if name.source_stage == stage] == list(range(50))


def test_receipts_have_no_payload(store: Store) -> None:
    writer = writer_for(store)
    writer.append_receipt(key(2), 2**63 + 5, "bfloat16", (4, 2))
    writer.close(60)
    (record,) = read_segment(store, f"{LOG}/{store.list(LOG)[0]}", RUN)
    assert (record.kind, record.checksum, record.dtype, record.shape) == (
        RecordKind.RECEIPT, 2**63 + 5, "bfloat16", (4, 2),
    )  # fmt: skip
    assert record.payload is None
