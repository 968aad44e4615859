"""The log stays within its disk budget: soft, it requests a checkpoint; hard, the sender waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.logging import LogBudget, LogOptions, LogReader, LogStats, LogWriter, Ship
from swift_ft.logging.writing.disk_budget import DiskBudget
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.storage.store import Store
from tests.support.log import LOG, events_of, identity, key

MESSAGE = torch.arange(25_000, dtype=torch.float32)  # 100 kB


def writer_for(
    store: Store,
    stats: LogStats | None = None,
    *,
    disk_bytes: int,
    stall_timeout_s: float = 60.0,
    **tiers: object,
) -> LogWriter:
    budget = LogBudget(150_000, disk_bytes)
    options = LogOptions(budget, stall_timeout_s=stall_timeout_s, **tiers)  # type: ignore[arg-type]
    return LogWriter(store, LOG, identity(), options, stats=stats)


@contextlib.contextmanager
def used_up(writer: LogWriter, count: int, caplog: pytest.LogCaptureFixture) -> Iterator[threading.Event]:
    """Sends messages in a thread. Yields when the disk is used up; the event is set when all are sent."""
    done, deadline = threading.Event(), time.monotonic() + 60

    def send() -> None:
        for iteration in range(count):
            writer.append_message(key(iteration), MESSAGE)
            writer.roll()
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        while "disk_budget_exhausted" not in events_of(caplog):
            assert time.monotonic() < deadline, "the budget was never used up"
            done.wait(0.001)
        yield done
    finally:
        sender.join(60)
    assert events_of(caplog).count("disk_budget_exhausted") == 1  # once per writer, not per message


def test_a_sender_waits_until_a_checkpoint_evicts_segments(
    local: Store, caplog: pytest.LogCaptureFixture
) -> None:
    stats = LogStats()
    writer = writer_for(local, stats, disk_bytes=350_000)
    with used_up(writer, 6, caplog) as done:
        assert not done.is_set()
        assert writer.metrics().disk_bytes <= 350_000
        writer.drop_before(2)  # a checkpoint of iteration 2 is committed
        writer.drop_before(6)
        assert done.wait(60)
    assert stats.total.held_back_s > 0
    writer.close(60)
    assert writer.metrics().disk_bytes == sum(local.size(f"{LOG}/{name}") for name in local.list(LOG))


def test_a_sender_does_not_wait_for_ever(local: Store) -> None:
    options = LogOptions(LogBudget(disk_bytes=150_000), stall_timeout_s=0.0)
    writer = LogWriter(local, LOG, identity(), options)
    for iteration in range(4):
        with contextlib.suppress(LogTimeoutError):  # it is known when the thread has come so far
            writer.append_message(key(iteration), MESSAGE)

    def until_it_raises() -> None:
        while True:  # every call raises it from then on
            writer.roll()

    with pytest.raises(LogTimeoutError, match=r"used up its 150000 bytes.*raise log_budget_bytes"):
        until_it_raises()


def test_after_a_failure_everything_is_written_at_once(
    local: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A survivor's log counts for more than its budget."""
    writer = writer_for(local, disk_bytes=250_000)
    with used_up(writer, 3, caplog):
        writer.flush(60)
    writer.flush(60)
    assert writer.metrics().disk_bytes > 250_000
    reader = LogReader(local, [LOG], run_id=identity().run_id)
    reader.refresh()
    assert all(reader.has(key(iteration)) for iteration in range(3))
    writer.drop_before(3)
    writer.close(60)


def test_the_local_tier_ships_before_a_sender_waits(local: Store, tmp_path: Path) -> None:
    """With ship="on-failure" nothing is uploaded while there is room."""
    writer = writer_for(local, disk_bytes=250_000, ship=Ship.ON_FAILURE, local=tmp_path / "tier")
    for iteration in range(2):
        writer.append_message(key(iteration), MESSAGE)
    writer.roll()
    assert not local.list(LOG)
    for iteration in range(2, 6):
        writer.append_message(key(iteration), MESSAGE)
    writer.close(60)
    assert local.list(LOG)


def test_segments_of_earlier_writers_count(local: Store) -> None:
    first = writer_for(local, disk_bytes=1_000_000)
    first.append_message(key(0), MESSAGE)
    first.close(60)
    second = writer_for(local, disk_bytes=1_000_000)
    assert second.metrics().disk_bytes == first.metrics().bytes
    second.close(60)


@pytest.mark.parametrize(
    ("used", "iteration_bytes", "wanted"),
    [(0, 10, False), (799, 10, False), (801, 10, True), (500, 126, True), (500, 125, False)],
)
def test_when_a_checkpoint_is_wanted(used: int, iteration_bytes: int, wanted: bool) -> None:
    """At 80 % of the budget, or when what is left is four iterations' worth."""
    disk = DiskBudget(1000)
    disk.add("segment", used)
    assert disk.nearly_full(iteration_bytes) is wanted
    assert not DiskBudget(None).nearly_full(1 << 60)


def test_evictable_segments_do_not_count_as_used() -> None:
    disk, gone = DiskBudget(1000), list[str]()
    for name in "abcd":
        disk.add(name, 240)
    assert disk.nearly_full(10)
    for name in "bac":
        disk.mark_evictable(name, partial(gone.append, name))
    assert not disk.nearly_full(10)
    assert disk.bytes == 960
    assert disk.wait_until_fits(40, 0.0)
    assert gone == []
    assert disk.wait_until_fits(400, 0.0)
    assert gone == ["b", "a"]
    assert disk.bytes == 480
    assert not disk.wait_until_fits(800, 0.0)  # one segment must stay, so evicting the others would not help
    assert gone == ["b", "a"]
    disk.evict_down_to(100)
    assert gone == ["b", "a", "c"]
    assert disk.bytes == 240


def test_a_budget_that_no_checkpoint_can_keep_is_an_error_at_once() -> None:
    with pytest.raises(UsageError, match=r"1000 bytes of disk.*up to 201.*needs 1005"):
        DiskBudget(1000).nearly_full(201)


def test_the_share_of_a_worker() -> None:
    assert LogBudget(100, 1000).of_worker(4) == LogBudget(25, 250)
    assert LogBudget(100).of_worker(2) == LogBudget(50, None)
