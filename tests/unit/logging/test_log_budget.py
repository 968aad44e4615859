"""The log stays within its budget of disk: soft, a checkpoint is wanted; hard, the sender waits."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from logging_helpers import LOG, identity, key

from swift_ft.errors import UsageError
from swift_ft.logging import (
    Ledger,
    LogBudget,
    LogOptions,
    LogReader,
    LogTimeoutError,
    LogWriter,
    Ship,
    Store,
)
from swift_ft.logging.disk import DiskUse

MESSAGE = torch.arange(25_000, dtype=torch.float32)  # 100 kB


def writer_for(
    store: Store,
    ledger: Ledger | None = None,
    *,
    disk_bytes: int,
    stall_timeout_s: float = 60.0,
    **tiers: object,
) -> LogWriter:
    budget = LogBudget(150_000, disk_bytes)
    options = LogOptions(budget, stall_timeout_s=stall_timeout_s, **tiers)  # type: ignore[arg-type]
    return LogWriter(store, LOG, identity(), options, ledger=ledger)


@contextlib.contextmanager
def used_up(writer: LogWriter, count: int) -> Iterator[threading.Event]:
    """Sends so many messages in a thread. Yields when the disk is used up; the event: all are sent."""
    done, deadline = threading.Event(), time.monotonic() + 60

    def send() -> None:
        for iteration in range(count):
            writer.append_message(key(iteration), MESSAGE)
            writer.cut()
        done.set()

    sender = threading.Thread(target=send)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sender.start()
        try:
            while not any("has used up its" in str(warning.message) for warning in caught):
                assert time.monotonic() < deadline, "the budget was never used up"
                done.wait(0.001)
            yield done
        finally:
            sender.join(60)


def test_a_sender_waits_until_a_checkpoint_lets_segments_go(local: Store) -> None:
    ledger = Ledger()
    writer = writer_for(local, ledger, disk_bytes=350_000)
    with used_up(writer, 6) as done:
        assert not done.is_set()
        assert writer.metrics().disk_bytes <= 350_000
        writer.drop_before(2)  # a checkpoint of iteration 2 is committed
        writer.drop_before(6)
        assert done.wait(60)
    assert ledger.total.held_back_s > 0
    writer.close(60)
    assert writer.metrics().disk_bytes == sum(local.size(f"{LOG}/{name}") for name in local.list(LOG))


@pytest.mark.filterwarnings("ignore:The log .* has used up")
def test_a_sender_does_not_wait_for_ever(local: Store) -> None:
    options = LogOptions(LogBudget(disk_bytes=150_000), stall_timeout_s=0.0)
    writer = LogWriter(local, LOG, identity(), options)
    for iteration in range(4):
        with contextlib.suppress(LogTimeoutError):  # it is known when the thread has come so far
            writer.append_message(key(iteration), MESSAGE)

    def until_told() -> None:
        while True:  # every call tells it from then on
            writer.cut()

    with pytest.raises(LogTimeoutError, match=r"used up its 150000 bytes.*raise log_budget_bytes"):
        until_told()


def test_after_a_failure_everything_is_written_at_once(local: Store) -> None:
    """A survivor's log counts for more than its budget."""
    writer = writer_for(local, disk_bytes=250_000)
    with used_up(writer, 3):
        writer.flush(60)
    writer.flush(60)
    assert writer.metrics().disk_bytes > 250_000
    reader = LogReader(local, [LOG], run_id=identity().run_id)
    reader.refresh()
    assert all(reader.has(key(iteration)) for iteration in range(3))
    writer.drop_before(3)
    writer.close(60)


@pytest.mark.filterwarnings("ignore:The log .* has used up")  # for as long as shipping takes
def test_the_local_tier_ships_before_anybody_waits(local: Store, tmp_path: Path) -> None:
    """With ship="on-failure" the network is spared as long as there is room."""
    writer = writer_for(local, disk_bytes=250_000, ship=Ship.ON_FAILURE, local=tmp_path / "tier")
    for iteration in range(2):
        writer.append_message(key(iteration), MESSAGE)
    writer.cut()
    assert not local.list(LOG)
    for iteration in range(2, 6):
        writer.append_message(key(iteration), MESSAGE)
    writer.close(60)
    assert local.list(LOG)


def test_what_earlier_writers_left_counts(local: Store) -> None:
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
    disk = DiskUse(1000)
    disk.add("segment", used)
    assert disk.nearly_full(iteration_bytes) is wanted
    assert not DiskUse(None).nearly_full(1 << 60)


def test_what_may_go_at_any_time_counts_for_nothing() -> None:
    disk, gone = DiskUse(1000), list[str]()
    for name in "abcd":
        disk.add(name, 240)
    assert disk.nearly_full(10)
    for name in "bac":
        disk.spare(name, partial(gone.append, name))
    assert not disk.nearly_full(10)
    assert disk.bytes == 960
    assert disk.wait_until_fits(40, 0.0)
    assert gone == []
    assert disk.wait_until_fits(400, 0.0)
    assert gone == ["b", "a"]
    assert disk.bytes == 480
    assert not disk.wait_until_fits(800, 0.0)  # for want of the one that must stay, and so nothing goes
    assert gone == ["b", "a"]
    disk.keep_spare(100)
    assert gone == ["b", "a", "c"]
    assert disk.bytes == 240


def test_a_budget_that_no_checkpoint_can_keep_is_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"1000 bytes of disk.*up to 201.*needs 1005"):
        DiskUse(1000).nearly_full(201)


def test_the_share_of_a_worker() -> None:
    assert LogBudget(100, 1000).of_worker(4) == LogBudget(25, 250)
    assert LogBudget(100).of_worker(2) == LogBudget(50, None)
