"""How fast the log is written and read, against plain writes and reads of the same store.

    file    the writer against plain write() calls of the same bytes to the same disk, both synchronised at
            the end as by `dd conv=fdatasync`; the reader (checksums verified, every message copied into a
            buffer) against plain reads into such a buffer. No page is cached when a reading begins.
    s3      the same through the local tier to a SeaweedFS on this host, against s3fs's put and get of files
            as large as the segments
    hdfs    the same with a NameNode and two DataNodes on this host, against hdfs-native's

The servers are those of the tests, and share the cores with us. CPU seconds are this process's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch

from benchmarks.lib.results import Summary, Target, argument_parser, finish, table, target_table
from examples.commands import ROOT
from swift_ft.logging import (
    Direction,
    LogOptions,
    LogReader,
    LogWriter,
    MessageKey,
    SegmentIdentity,
)
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import tensor_bytes

LOG = "log/rank-00000"
SEGMENT_BYTES = 64 << 20
LIMIT = 0.9
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Sample:
    """One pass over all bytes."""

    mb_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Place:
    """A store: its URL for our log, and two functions for plain writes and reads."""

    url: str
    raw_write: Callable[[torch.Tensor, int], None]
    raw_read: Callable[[torch.Tensor], None]
    folder: Path | None = None


def main() -> int:
    """Measures the chosen stores and prints the report."""
    parser = argument_parser(__doc__, repetitions=5)
    parser.add_argument("--megabytes", type=int, default=512, help="to write, default: %(default)s")
    parser.add_argument("--message-kb", type=int, default=1536, help="of each message, default: %(default)s")
    parser.add_argument("--stores", nargs="+", default=["file", "s3", "hdfs"], choices=["file", "s3", "hdfs"])
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one")
    args = parser.parse_args()
    message = torch.randn(args.message_kb * 256)
    count = max(1, args.megabytes * 1_000_000 // message.nbytes)
    samples: dict[str, dict[str, list[Sample]]] = {}
    for name in args.stores:
        samples[name] = {variant: [] for variant in ("raw write", "writer", "raw read", "reader")}
        with (
            tempfile.TemporaryDirectory(prefix="swift-bench-", dir=args.folder) as folder,
            _place(name, Path(folder)) as place,
        ):
            for repetition in range(args.repetitions):
                for variant, sample in one_round(place, message, count, repetition):
                    samples[name][variant].append(sample)
                    print(f"# {name}, {variant}: {sample.mb_s:.0f} MB/s", file=sys.stderr, flush=True)
    targets = judge(samples)
    body = report(samples, targets, count * message.nbytes)
    return finish("log-throughput", body, {"samples": samples}, args)


# ------------------------------------------------------------------------------------------------- places


def _place(name: str, folder: Path) -> contextlib.AbstractContextManager[Place]:
    return {"file": _file, "s3": _s3, "hdfs": _hdfs}[name](folder)


@contextlib.contextmanager
def _file(folder: Path) -> Iterator[Place]:
    raw = folder / "raw"

    def write(message: torch.Tensor, count: int) -> None:
        data = tensor_bytes(message)
        with raw.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
            os.fdatasync(file.fileno())
        _forget(raw)

    def read(message: torch.Tensor) -> None:
        with raw.open("rb", buffering=0) as file:
            while file.readinto(tensor_bytes(message)):
                pass

    yield Place(f"file://{folder}/log", write, read, folder)


@contextlib.contextmanager
def _s3(folder: Path) -> Iterator[Place]:
    from benchmarks.lib.seaweed import BUCKET, SeaweedServer

    server = SeaweedServer(folder / "seaweed")
    os.environ.update(server.environment)
    try:
        server.start()
        yield _remote(f"s3://{BUCKET}/bench", folder)
    finally:
        server.kill()


@contextlib.contextmanager
def _hdfs(folder: Path) -> Iterator[Place]:
    from benchmarks.lib.hadoop import HdfsCluster, classpath

    cache = ROOT / ".pytest_cache" / "d" / "hadoop"
    cache.mkdir(parents=True, exist_ok=True)
    cluster = HdfsCluster(folder / "hdfs", classpath(cache))
    try:
        cluster.start()
        Store(f"{cluster.url}/bench").probe()
        yield _remote(f"{cluster.url}/bench", folder)
    finally:
        cluster.stop()


def _remote(url: str, folder: Path) -> Place:
    fs, root = fsspec.core.url_to_fs(f"{url}/raw")

    def write(message: torch.Tensor, count: int) -> None:
        local, per_file = folder / "raw", max(1, SEGMENT_BYTES // message.nbytes)
        fs.makedirs(root, exist_ok=True)
        for index, first in enumerate(range(0, count, per_file)):
            with local.open("wb", buffering=0) as file:
                for _ in range(first, min(first + per_file, count)):
                    file.write(tensor_bytes(message))
            fs.put_file(str(local), f"{root}/{index:05d}")

    def read(message: torch.Tensor) -> None:
        fs.invalidate_cache()
        for path in sorted(fs.find(root)):
            fs.get_file(path, str(folder / "raw"))
            with (folder / "raw").open("rb", buffering=0) as file:
                while file.readinto(tensor_bytes(message)):
                    pass

    return Place(f"{url}/log", write, read)


# ------------------------------------------------------------------------------------------------ measuring


def one_round(
    place: Place, message: torch.Tensor, count: int, repetition: int
) -> Iterator[tuple[str, Sample]]:
    """Everything once; the order changes from one repetition to the next."""
    store = Store(place.url)
    buffer = torch.empty_like(message)
    size = count * message.nbytes
    writes: list[tuple[str, Callable[[], Any]]] = [
        ("raw write", lambda: place.raw_write(message, count)),
        ("writer", lambda: write_log(store, message, count, place.folder)),
    ]
    reads: list[tuple[str, Callable[[], Any]]] = [
        ("raw read", lambda: place.raw_read(buffer)),
        ("reader", lambda: read_log(store, buffer, count)),
    ]
    for variants in (writes, reads):
        for variant, action in variants[:: -1 if repetition % 2 else 1]:
            yield variant, _timed(action, size)
    store.delete_all()


def write_log(store: Store, message: torch.Tensor, count: int, folder: Path | None) -> None:
    """Logs the same tensor ``count`` times, and waits until all is in the store and on its disk."""
    writer = LogWriter(store, LOG, SegmentIdentity("bench", 0, 0), LogOptions(segment_bytes=SEGMENT_BYTES))
    for index in range(count):
        writer.append_message(_key(index), message)
    writer.close(DEADLINE_S)
    for path in (folder / "log" / LOG).iterdir() if folder else ():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
        _forget(path)


def read_log(store: Store, buffer: torch.Tensor, count: int) -> None:
    """As a replay does."""
    reader = LogReader(store, [LOG], run_id="bench")
    reader.refresh()
    for index in range(count):
        reader.read_into(_key(index), buffer)


def _key(index: int) -> MessageKey:
    return MessageKey(index // 8, index % 8, Direction.FORWARD, 0, 1, 0)


def _forget(path: Path) -> None:
    """Drops a file that is on the disk from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(action: Callable[[], Any], size: int) -> Sample:
    started, cpu = time.perf_counter(), time.process_time()
    action()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Sample(size / 1e6 / seconds, cpu / (size / 1e9))


# --------------------------------------------------------------------------------------------------- results


def ratio(samples: dict[str, list[Sample]], ours: str, raw: str) -> Summary:
    """Our speed divided by that of plain writes or reads, within each repetition."""
    return Summary.of([a.mb_s / b.mb_s for a, b in zip(samples[ours], samples[raw], strict=True)])


def judge(samples: dict[str, dict[str, list[Sample]]]) -> list[Target]:
    """What was asked for, against the medians."""
    found = []
    for name, variants in samples.items():
        for ours, raw in (("writer", "raw write"), ("reader", "raw read")):
            one = ratio(variants, ours, raw)
            found.append(Target(f"{name}: {ours} / {raw}", f">= {LIMIT}", one.text(""), one.median >= LIMIT))
    return found


def report(samples: dict[str, dict[str, list[Sample]]], targets: list[Target], size: int) -> str:
    """All results as Markdown."""
    rows = [
        [
            *(name, variant, Summary.of([one.mb_s for one in found]).text("", 0)),
            Summary.of([one.cpu_s_per_gb for one in found]).text("", 2),
        ]
        for name, variants in samples.items()
        for variant, found in variants.items()
    ]
    intro = (
        f"{size / 1e6:.0f} MB of float32 messages in segments of {SEGMENT_BYTES >> 20} MiB; medians (ranges)."
    )
    return f"{intro}\n\n{table(['store', '', 'MB/s', 'CPU s per GB'], rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(main())
