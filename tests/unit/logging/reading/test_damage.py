"""Damaged, mixed-up or forged logs: errors name file and message, and memory stays bounded."""

from __future__ import annotations

import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from swift_ft.errors import LogCorruptError, LogMissingError, LogTornError, RecoveryError
from swift_ft.logging import LogReader, LogWriter, read_segment
from swift_ft.logging.format import encoding
from swift_ft.storage.store import Store
from tests.support.log import LOG, RUN, identity, key, load, message, write_segment

OTHER = "log/rank00001"


def segments(store: Store, count: int = 4, directory: str = LOG, generation: int = 0) -> list[str]:
    """One iteration in each."""
    return [
        write_segment(
            store, [message(key(i), torch.full((8,), float(i)))], identity(generation), i, directory
        )
        for i in range(count)
    ]


def opened(store: Store, **options: Any) -> LogReader:
    return load(LogReader(store, [LOG], run_id=RUN, **options))


def file_of(store: Store, path: str) -> Path:
    return Path(store.child_url(path).removeprefix("file://"))


def test_a_missing_middle_segment_is_named(store: Store) -> None:
    paths = segments(store)
    store.delete(paths[2])
    with pytest.raises(LogMissingError, match=r"g00000-s000002.*iterations 1 to 3") as caught:
        opened(store)
    assert caught.value.fields["path"] == f"{LOG}/g00000-s000002"
    with pytest.raises(LogMissingError):
        opened(store, from_iteration=2)
    assert opened(store, from_iteration=4).keys(4) == []


def test_what_a_checkpoint_covers_is_not_missing(store: Store) -> None:
    """§5.1: the log is dropped from its beginning on."""
    paths = segments(store)
    for path in paths[:2]:
        store.delete(path)
    assert opened(store).has(key(2))


def test_a_missing_first_or_last_segment_raises_for_its_messages(store: Store) -> None:
    paths = segments(store)
    store.delete(paths[3])
    with pytest.raises(LogMissingError, match="iteration 3") as caught:
        opened(store).read(key(3))
    assert caught.value.fields["key"] == key(3)


@pytest.mark.parametrize("target", [1, 4], ids=["over another", "as a further one"])
def test_a_duplicated_segment_is_detected(local: Store, target: int) -> None:
    paths = segments(local)
    copy = f"{LOG}/g00000-s{target:06d}-i00000000-00000000.arrow"
    if target == 1:
        local.delete(paths[1])
    shutil.copy(file_of(local, paths[0]), file_of(local, copy))
    with pytest.raises(LogCorruptError, match="renamed") as caught:
        opened(local)
    assert caught.value.fields["path"] == copy


def test_reordered_segments_are_detected(local: Store) -> None:
    paths = segments(local)
    one, two = (file_of(local, path) for path in paths[1:3])
    three = one.with_name("aside")
    one.rename(three)
    two.rename(one)
    three.rename(two)
    with pytest.raises(LogCorruptError, match="renamed") as caught:
        opened(local)
    assert caught.value.fields["path"] in paths[1:3]


def test_an_older_generations_segment_under_a_newer_name_is_detected(local: Store) -> None:
    (path,) = segments(local, 1)
    newer = path.replace("g00000", "g00007")
    file_of(local, path).rename(file_of(local, newer))
    with pytest.raises(LogCorruptError, match="renamed"):
        opened(local, since_generation=7)


def test_another_workers_segment_is_detected(local: Store) -> None:
    paths = segments(local)
    write_segment(local, [message(key(4, source_stage=3), torch.zeros(8))], identity(rank=3), 4)
    assert len(local.list(LOG)) == len(paths) + 1
    with pytest.raises(LogCorruptError, match="worker 3"):
        opened(local)


# ------------------------------------------------------------------------------------------ forged headers


def batch_starts(whole: bytes) -> list[int]:
    return [i for i in range(0, len(whole), 4) if whole[i : i + 4] == b"\xff\xff\xff\xff"][:-1]


def forged(whole: bytes, what: str) -> bytes:
    _, first, *_ = batch_starts(whole)
    (metadata_size,) = struct.unpack_from("<i", whole, first + 4)
    metadata = whole[first + 8 : first + 8 + metadata_size]
    if what == "metadata of 2 GiB":
        return whole[: first + 4] + struct.pack("<i", 2**31 - 1) + whole[first + 8 :]
    if what == "negative metadata":
        return whole[: first + 4] + struct.pack("<i", -5) + whole[first + 8 :]
    size = whole[first + 8 + metadata_size :].index(b"\xff\xff\xff\xff")
    body = struct.pack("<q", size)
    assert metadata.count(body) == 1
    if what == "body of 32 TiB":
        changed = metadata.replace(body, struct.pack("<q", 2**45))
    else:  # the payload's last offset
        at = whole.index(struct.pack("<qq", 0, 32), first + 8 + metadata_size)
        return whole[:at] + struct.pack("<qq", 0, 2**45) + whole[at + 16 :]
    return whole.replace(metadata, changed)


@pytest.mark.parametrize(
    "what", ["metadata of 2 GiB", "negative metadata", "body of 32 TiB", "payload of 32 TiB"]
)
def test_forged_sizes_cost_no_memory(local: Store, what: str) -> None:
    (path,) = segments(local, 1)
    whole = local.open_read(path).read()
    file_of(local, path).write_bytes(forged(whole, what))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((LogCorruptError, LogTornError)) as caught:
        opened(local)
    assert caught.value.fields["path"] == path
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_bomb_of_arrows_own_compression_is_not_unpacked(local: Store) -> None:
    """Half a gigabyte of zeros in a few kilobytes, in a body that Arrow would unpack by itself."""
    (path,) = segments(local, 1)
    with pa.memory_map(str(file_of(local, path))) as file:
        schema = pa.ipc.open_stream(file).schema
    bomb = encoding.encode(message(key(0), torch.zeros(1 << 27, dtype=torch.uint8)))
    with pa.OSFile(str(file_of(local, path)), "wb") as sink:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, schema, options=options) as stream:
            stream.write_batch(bomb)
    allocated = pa.default_memory_pool().max_memory()
    with pytest.raises(LogCorruptError, match="compressed"):
        opened(local)
    assert pa.default_memory_pool().max_memory() - allocated < 1 << 20


def test_a_foreign_arrow_file_is_no_segment(local: Store) -> None:
    (path,) = segments(local, 1)
    with pa.OSFile(str(file_of(local, path)), "wb") as sink:
        table = pa.table({"x": [1, 2]})
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(LogCorruptError, match=path):
        opened(local)


# -------------------------------------------------------------------------------------------- dead writers

_WRITER = """
import sys, torch
from tests.support.log import LOG, identity, key, message
from swift_ft.logging.format.segment import SegmentWriter
from swift_ft.storage.store import Store
writer = SegmentWriter(Store(sys.argv[1]), LOG, identity(generation=1), 0)
sink = writer._file.sink
for i in range(5):
    writer.append(message(key(i), torch.full((3000,), float(i))))
    print(sink.tell(), flush=True)
    sys.stdin.readline()
"""


def test_a_writer_that_is_killed_leaves_nothing_that_counts(local: Store) -> None:
    """SIGKILL between the records of an open segment: no segment, and the next writer sweeps the rest."""
    program = [sys.executable, "-c", _WRITER, local.url]
    for survived in range(1, 4):
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(survived):
                assert process.stdout.readline()
                process.stdin.write("\n")
                process.stdin.flush()
            process.kill()
        assert [name for name in local.list(LOG) if not name.endswith(".tmp")] == []
        assert not opened(local).has(key(0))
    assert len(local.list(LOG)) == 3
    LogWriter(local, LOG, identity(generation=2)).close(60)
    assert local.list(LOG) == []


def test_every_prefix_that_a_kill_can_leave_is_refused(local: Store) -> None:
    """As if the rename had come before the last bytes: a file system that reorders the two after a crash."""
    (path,) = segments(local, 1)
    whole = local.open_read(path).read()
    file = file_of(local, path)
    for length in range(0, len(whole), 3):
        file.unlink()
        file.write_bytes(whole[:length])
        with pytest.raises(RecoveryError) as caught:
            read_segment(local, path, RUN)
        assert caught.value.fields["path"] == path
