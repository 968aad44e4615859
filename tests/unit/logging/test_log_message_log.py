"""From messages to the log: at once from the host, in bubbles from a device; and what that cost."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice
from logging_helpers import LOG, RUN, identity, key

from swift_ft.errors import UnsupportedError
from swift_ft.logging import (
    Account,
    Ledger,
    LogOptions,
    LogReader,
    LogWriter,
    MessageLog,
    Store,
    checksum_of,
)
from swift_ft.logging.message_log import device_of


def log_of(store: Store) -> LogReader:
    reader = LogReader(store, [LOG], run_id=RUN)
    reader.refresh()
    return reader


def test_a_device_and_a_host_log_the_same(store: Store) -> None:
    """One iteration of a stage: two messages in, two out; each way of logging in its own directory."""
    device = FakeDevice(copy_s=0.1)
    logs = {}
    for name, way in (("host", None), ("device", device)):
        ledger = Ledger()
        log = MessageLog(LogOptions(), ledger, device_of=lambda _, way=way: way, clock=device.clock)
        log.writer = LogWriter(store, f"log/{name}", identity(), ledger=ledger, lazy=True)
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
        logs[name] = [
            (record.key, record.checksum, bytes(record.payload or b"")) for record in reader.messages(0)
        ] + [reader.receipt(key(0, i, source_stage=0, destination_stage=1)) for i in range(2)]
        assert (ledger.last.messages, ledger.last.bytes) == (2, 24)
        assert ledger.total.bubble_s == 2.0
    assert logs["host"] == logs["device"]
    assert logs["host"][2:] == [checksum_of(torch.full((3,), float(i))) for i in range(2)]


def test_a_lazy_writer_rests_until_the_bubble(store: Store) -> None:
    log = MessageLog(LogOptions(), Ledger())
    log.writer = LogWriter(store, LOG, identity(), lazy=True)
    log.sent(key(0), torch.ones(3))
    assert log.writer.metrics().records == 0
    log.bubble_begins()
    log.writer.cut()
    log.writer.flush(60)
    assert log.writer.metrics().records == 1
    log.sent(key(1), torch.ones(3))
    log.writer.close(60)
    assert log_of(store).has(key(1))


def test_a_lazy_writer_is_woken_when_half_of_the_memory_is_used(url: str) -> None:
    """Else it would rest while senders wait."""
    from logging_helpers import BlockedStore

    from swift_ft.logging import LogBudget

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


def test_accounts_add_up() -> None:
    ledger = Ledger()
    ledger.add(Account(1, 10, 0.5, queue_high_water_bytes=7))
    ledger.add(Account(1, 20, 0.25, 0.1, 0.2, 0.3, 5, 9))
    first = ledger.end_iteration()
    assert first == Account(2, 30, 0.75, 0.1, 0.2, 0.3, 7, 9)
    ledger.add(Account(1, 1, queue_high_water_bytes=1))
    assert ledger.last == first
    assert ledger.total == Account(3, 31, 0.75, 0.1, 0.2, 0.3, 7, 9)
    assert ledger.end_iteration() == Account(1, 1, queue_high_water_bytes=1)
    assert ledger.largest_bytes == 30
