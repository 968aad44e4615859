"""The local tier: what is on its way, what is dropped there, what dead processes left, and a full disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swift_ft.errors import SwiftError
from swift_ft.logging import CodecPolicy, LogBudget, LogOptions, LogReader, LogWriter, SegmentUploader, Ship
from swift_ft.logging.reading.prefetcher import Prefetcher
from swift_ft.logging.writing import uploader
from swift_ft.logging.writing.uploader import LogTimeoutError, Spool
from swift_ft.storage.store import Store
from tests.support.disks import mounted_disk
from tests.support.log import LOG, RUN, events_of, identity, key


class FailingStore(Store):
    """Uploads fail while ``broken``."""

    broken = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.attempted = threading.Event()

    def upload(self, local: Path, path: str) -> None:
        self.attempted.set()
        if self.broken:
            raise PermissionError(13, "Permission denied")
        super().upload(local, path)


class SlowStore(Store):
    """An upload writes a temporary file, and goes on once ``open_gate`` is set; unless it fails then."""

    def __init__(self, url: str, *, fails: bool = False) -> None:
        super().__init__(url)
        self.fails = fails
        self.begun, self.open_gate = threading.Event(), threading.Event()

    def upload(self, local: Path, path: str) -> None:
        temporary = Path(self.root, f"{path}.0.tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        self.begun.set()
        assert self.open_gate.wait(60)
        if self.fails:  # without a chance to tidy up
            raise ConnectionError("the store is away")
        super().upload(local, path)
        temporary.unlink()


def writer_for(store: Store, tmp_path: Path, ship: Ship = Ship.ALWAYS) -> LogWriter:
    return LogWriter(store, LOG, identity(), LogOptions(ship=ship, local=tmp_path / "local"))


def append(writer: LogWriter, iterations: range) -> None:
    for i in iterations:
        writer.append_message(key(i), torch.full((100,), float(i)))
        writer.roll()


def iterations_in(store: Store, count: int) -> list[int]:
    reader = LogReader(store, [LOG], run_id=RUN)
    reader.refresh()
    return [i for i in range(count) if reader.has(key(i))]


def test_a_store_that_lost_its_permission_is_waited_for(url: str, tmp_path: Path) -> None:
    store = FailingStore(url)
    writer = writer_for(store, tmp_path)
    append(writer, range(3))
    assert store.attempted.wait(60)
    with pytest.raises(LogTimeoutError, match=r"3 segments .*PermissionError"):
        writer.flush(0.5)
    assert store.list(LOG) == []
    store.broken = False
    writer.close(60)
    assert iterations_in(store, 3) == [0, 1, 2]
    assert list((tmp_path / "local").iterdir()) == []


def test_on_failure_uploads_at_the_flush(store: Store, tmp_path: Path) -> None:
    writer = writer_for(store, tmp_path, Ship.ON_FAILURE)
    append(writer, range(4))
    (spool,) = (tmp_path / "local").iterdir()
    writer.flush(60)
    assert iterations_in(store, 4) == [0, 1, 2, 3]
    assert list((spool / "log" / LOG).iterdir()) == []
    writer.close(60)


def test_segments_that_a_checkpoint_covers_are_no_longer_uploaded(url: str, tmp_path: Path) -> None:
    store = FailingStore(url)
    writer = writer_for(store, tmp_path)
    append(writer, range(5))
    assert store.attempted.wait(60)
    with pytest.raises(LogTimeoutError):
        writer.flush(0.0)
    with pytest.raises(LogTimeoutError):
        writer.flush(0.5)  # all five have been offered when this ends
    assert len(writer.drop_before(3)) == 3
    store.broken = False
    writer.close(60)
    assert iterations_in(store, 5) == [3, 4]


@pytest.mark.parametrize(("fails", "dropped"), [(False, False), (False, True), (True, False)])
def test_an_upload_that_is_under_way_at_the_end_leaves_nothing_begun(
    fails: bool, dropped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends right afterwards, and nobody tidies up after it."""
    monkeypatch.setattr(uploader, "_RETRY_S", 0.01)
    store = SlowStore(str(tmp_path / "store"), fails=fails)
    writer, tier = keeping(store, tmp_path)
    append(writer, range(2))
    writer.close(60, uploaded=False)
    assert store.begun.wait(60)
    if dropped:
        tier.drop(lambda name: True)
    gate = threading.Timer(0.2, store.open_gate.set)
    gate.start()
    tier.close(60)
    assert store.list(LOG) == ([] if fails or dropped else tier.names()[:1])
    gate.join()


def test_an_upload_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploader, "_RETRY_S", 0.01)
    store = SlowStore(str(tmp_path / "store"))
    writer, tier = keeping(store, tmp_path)
    append(writer, range(1))
    writer.close(60, uploaded=False)
    assert store.begun.wait(60)
    tier.close(0.01)
    assert events_of(caplog) == ["log_upload_cut_off"]
    assert list((tmp_path / "local").iterdir()) == []
    store.open_gate.set()


def keeping(store: Store, tmp_path: Path, disk_bytes: int | None = None) -> tuple[LogWriter, SegmentUploader]:
    """Uploaded segments stay on the local disk, too; a writer uses that."""
    options = LogOptions(LogBudget(150_000, disk_bytes), local=tmp_path / "local")
    tier = SegmentUploader(store, LOG, options, CodecPolicy(options.compress), keep=True)
    return LogWriter(store, LOG, identity(), options, tier=tier), tier


def is_here(tier: SegmentUploader, name: str) -> bool:
    try:
        tier.open(name)
    except FileNotFoundError:
        return False
    return True


def test_copies_are_kept_until_a_checkpoint(store: Store, tmp_path: Path) -> None:
    writer, tier = keeping(store, tmp_path)
    append(writer, range(4))
    writer.flush(60)
    assert store.list(LOG) == tier.names()
    assert [is_here(tier, name) for name in tier.names()] == [True] * 4
    assert writer.metrics().disk_bytes == writer.metrics().bytes
    dropped = writer.drop_before(3)
    assert [is_here(tier, name) for name in dropped] == [False] * 3
    assert store.list(LOG) == tier.names()
    assert [is_here(tier, name) for name in tier.names()] == [True]
    assert writer.metrics().disk_bytes == tier.local.size(f"{LOG}/{tier.names()[0]}")
    writer.close(60)
    tier.close(60)
    assert list((tmp_path / "local").iterdir()) == []


def test_a_tier_outlives_its_writers(url: str, tmp_path: Path) -> None:
    """Segments that one generation could not upload yet are uploaded while the next one writes."""
    store = FailingStore(url)
    first, tier = keeping(store, tmp_path)
    append(first, range(2))
    first.close(60, uploaded=False)
    assert store.list(LOG) == []
    second = LogWriter(store, LOG, identity(generation=1), LogOptions(), tier=tier)
    append(second, range(2, 4))
    assert second.metrics().waiting_segments >= 2
    store.broken = False
    second.close(60)
    assert iterations_in(store, 4) == [0, 1, 2, 3]
    assert [is_here(tier, name) for name in tier.names()] == [True] * 4
    tier.close(60)


def test_copies_are_evicted_when_the_budget_needs_their_room(store: Store, tmp_path: Path) -> None:
    writer, tier = keeping(store, tmp_path, disk_bytes=250_000)
    for i in range(8):
        writer.append_message(key(i), torch.full((25_000,), float(i)))  # 100 kB
        writer.roll()
        assert writer.metrics().disk_bytes <= 250_000
    writer.close(60)
    here = [is_here(tier, name) for name in tier.names()]
    assert here[0] is False
    assert here[-1] is True
    assert here == sorted(here)  # the oldest went first
    assert iterations_in(store, 8) == list(range(8))
    tier.close(60)


def test_copies_take_at_most_as_much_disk_as_stays_free(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    writer, tier = keeping(store, tmp_path)
    append(writer, range(3))
    writer.flush(60)
    assert [is_here(tier, name) for name in tier.names()] == [True] * 3
    free = tier.local.size(f"{LOG}/{tier.names()[0]}")
    append(writer, range(3, 4))
    writer.flush(60)
    assert [is_here(tier, name) for name in tier.names()] == [False, False, True, True]
    writer.close(60)
    tier.close(60)


def test_a_tier_opens_nothing_but_segments_of_the_log(store: Store, tmp_path: Path) -> None:
    writer, tier = keeping(store, tmp_path)
    append(writer, range(1))
    writer.flush(60)
    (name,) = tier.names()
    (tmp_path / "local" / "secret").write_text("not yours")
    for other in ("", "..", "../../../secret", f"../{LOG.rpartition('/')[2]}/{name}", f"./{name}"):
        with pytest.raises(FileNotFoundError):
            tier.find(other)
    assert tier.find(name).is_file()
    writer.close(60)
    tier.close(60)


def test_the_sequence_goes_on_after_what_is_in_the_store(store: Store, tmp_path: Path) -> None:
    for first in (0, 2):
        writer = writer_for(store, tmp_path)
        append(writer, range(first, first + 2))
        writer.close(60)
    assert [name[7:14] for name in store.list(LOG)] == ["s000000", "s000001", "s000002", "s000003"]


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal
from swift_ft.logging.writing.uploader import Spool
spool = Spool(pathlib.Path({str(tmp_path)!r}))
(spool.path / "segment").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    living = Spool(tmp_path)
    assert not left.exists()
    other = Spool(tmp_path)
    assert living.path.exists()
    for spool in (living, other):
        spool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted_disk(tmp_path, "1m") as disk:
        yield disk


def test_a_full_disk_is_waited_for(small_disk: Path) -> None:
    """Nothing is lost or torn, and the log goes on when there is room again."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (600 << 10))
    store = Store(str(small_disk / "store"))
    writer = LogWriter(store, LOG, identity(), LogOptions(LogBudget(100_000)))
    full = threading.Event()

    def clock() -> float:  # asked when a sender begins to wait for room in the queue
        full.set()
        return 0.0

    writer._clock = clock

    def send() -> None:
        for i in range(16):
            writer.append_message(key(i), torch.full((10_000,), float(i)))

    sender = threading.Thread(target=send)
    sender.start()
    assert full.wait(60)
    while os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize > 60_000:
        assert sender.is_alive()
    ballast.unlink()
    sender.join(60)
    assert not sender.is_alive()
    writer.close(60)
    assert iterations_in(store, 16) == list(range(16))


def test_copies_make_room_on_a_full_disk(small_disk: Path, store: Store) -> None:
    options = LogOptions(local=small_disk, stall_timeout_s=60.0)
    tier = SegmentUploader(store, LOG, options, CodecPolicy(options.compress), keep=True)
    writer = LogWriter(store, LOG, identity(), options, tier=tier)
    for i in range(8):
        writer.append_message(key(i), torch.full((50_000,), float(i)))  # 200 kB each
        writer.flush(60)
    assert iterations_in(store, 8) == list(range(8))
    writer.close(60)
    tier.close(60)


def test_a_disk_that_stays_full_is_an_error(small_disk: Path) -> None:
    writer = LogWriter(Store(str(small_disk / "store")), LOG, identity(), LogOptions(outage_patience_s=0.0))
    writer.append_message(key(0), torch.zeros(1 << 20))
    with pytest.raises(SwiftError, match=r"No space left on device.*make room"):
        writer.flush(60)


def test_attempts_that_fail_without_room_leave_nothing(small_disk: Path, tmp_path: Path) -> None:
    """Each has its own temporary name: together they would fill any room that is freed."""
    store = Store(str(small_disk / "store"), patience_s=0.0)
    store.write_json("run.json", {"run_id": "a"})
    segment = tmp_path / "segment"
    segment.write_bytes(b"x" * (2 << 20))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            store.upload(segment, "log/segment.arrow")
    (small_disk / "ballast").touch()
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096):
            pass
    for name in ("claim.json", "run.json"):
        with pytest.raises(OSError, match="No space left on device"):
            store.write_json(name, {"text": "y" * 8192})
    assert store.list("log") == []
    assert store.list("") == ["log", "run.json"]
    assert store.read_json("run.json") == {"run_id": "a"}


# --------------------------------------------------------------------------------------------- read-ahead


def test_the_next_items_are_fetched_in_advance() -> None:
    fetched: dict[str, threading.Event] = {name: threading.Event() for name in "abcdef"}

    def fetch(name: str) -> str:
        fetched[name].set()
        return name.upper()

    ahead = Prefetcher(fetch, depth=2, threads=2)
    ahead.plan("abcdef")
    assert fetched["a"].wait(60)
    assert fetched["b"].wait(60)
    assert not fetched["c"].is_set()
    assert ahead.take("a") == "A"
    assert fetched["c"].wait(60)
    assert not fetched["d"].is_set()
    assert ahead.take("f") == "F"  # out of order


def test_a_failed_fetch_raises_and_can_be_repeated() -> None:
    answers: list[Callable[[], str]] = [lambda: "there"]

    def fetch(name: str) -> str:
        return answers.pop()()

    def fail() -> str:
        raise OSError("away")

    answers.append(fail)
    ahead = Prefetcher(fetch, depth=4, threads=4)
    ahead.plan(["a"])
    with pytest.raises(OSError, match="away"):
        ahead.take("a")
    assert ahead.take("a") == "there"
