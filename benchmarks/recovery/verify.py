"""The speed of ``swift-recover verify``, beside a plain read of the same files.

A store with a log and a checkpoint is written as a run writes them. Then its files are read in two ways,
several times in turn: verified, and plainly, one after the other into one buffer. ``--cold`` drops the page
cache before each reading, which root may do: then the disk is measured, else the memory.

A pair of neighbouring readings makes a ratio. CPU time stands beside wall time: where other programs use the
machine, wall time says more of them than of us.

``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.lib.results import Summary, Target, argument_parser, finish, table, target_table
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import write_manifest
from swift_ft.checkpoint.run_record import write_record
from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.logging.format.record import Direction, MessageKey, Record, RecordKind, checksum_of
from swift_ft.logging.format.segment import SegmentIdentity, SegmentWriter
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.verification import verify_store
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import write_part

LIMIT = 0.8
REPETITIONS = 5
RUN = "run.1"
WORKERS, MICROBATCHES = 4, 8
SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Reading:
    """One way to read.

    Attributes:
        rate: GB per second of wall time.
        cpu_rate: GB per second of CPU time, of all threads together.
    """

    rate: Summary
    cpu_rate: Summary


@dataclass(frozen=True)
class Measured:
    """What was read, and how fast.

    Attributes:
        total_bytes: of all files that were read.
        verify: all of it verified.
        plain: read, and nothing else.
        ratio: of the speeds, pair by pair.
        cpu_ratio: of the speeds in CPU time, pair by pair.
    """

    total_bytes: int
    verify: Reading
    plain: Reading
    ratio: Summary
    cpu_ratio: Summary


def write_store(place: Path, log_bytes: int, checkpoint_bytes: int, message_bytes: int) -> None:
    """A pipeline's log of some iterations after its checkpoint of iteration 0."""
    store = Store(place)
    topology = {"machines": WORKERS, "workers": 1, "stages": WORKERS}
    write_record(store, {"run_id": RUN, "topology": topology, "earlier": [], "settings": {}})
    payload = memoryview(os.urandom(message_bytes))
    for rank in range(WORKERS):
        _write_log(store, rank, payload, log_bytes // WORKERS)
    folder, parts, digests = CheckpointFolder(store), {}, {}
    for rank in range(WORKERS):
        parts[rank] = folder.part(0, rank, 1)
        state = {"weight": torch.rand(checkpoint_bytes // WORKERS // 4)}
        digests[parts[rank]] = write_manifest(store, parts[rank], write_part(store, parts[rank], state))
    folder.commit(0, parts, RUN, digests)


def _write_log(store: Store, rank: int, payload: memoryview, size: int) -> None:
    stages = [(rank + 1, Direction.FORWARD)] if rank + 1 < WORKERS else []
    stages += [(rank - 1, Direction.BACKWARD)] if rank else []
    checksum, written, iteration, sequence = checksum_of(payload), 0, 0, 0
    writer: SegmentWriter | None = None
    while written < size:
        for microbatch in range(MICROBATCHES):
            for other, direction in stages:
                writer = writer or SegmentWriter(
                    store, log_directory(rank), SegmentIdentity(RUN, rank, 1), sequence
                )
                key = MessageKey(iteration, microbatch, direction, rank, other, 0)
                shape = (payload.nbytes // 4,)
                writer.append(Record(RecordKind.MESSAGE, key, "float32", shape, checksum, payload))
                written += payload.nbytes
                if writer.bytes_written >= SEGMENT_BYTES:
                    writer.commit()
                    writer, sequence = None, sequence + 1
        iteration += 1
    if writer is not None:
        writer.commit()


def read_plainly(files: Sequence[Path]) -> None:
    """Read all files, one after the other."""
    buffer = bytearray(BUFFER_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(place: Path, repetitions: int, *, cold: bool) -> Measured:
    """Both ways, in turn."""
    run = open_run_store(str(place))
    sizes = {path: facts.size for path, facts in run.store.find("").items()}
    files = [place / path for path in sizes]

    def verify() -> None:
        found = verify_store(run, sizes)
        assert not found.findings, found.findings

    total = sum(sizes.values())
    ways: dict[str, Callable[[], None]] = {"verify": verify, "plain": lambda: read_plainly(files)}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            if cold:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("1")
            began, cpu_began = time.perf_counter(), time.process_time()
            way()
            wall[name].append(total / 1e9 / (time.perf_counter() - began))
            cpu[name].append(total / 1e9 / (time.process_time() - cpu_began))
    verified, plain = (Reading(Summary.of(wall[name]), Summary.of(cpu[name])) for name in ways)
    return Measured(total, verified, plain, _ratio(wall), _ratio(cpu))


def _ratio(rates: Mapping[str, Sequence[float]]) -> Summary:
    return Summary.of([ours / theirs for ours, theirs in zip(rates["verify"], rates["plain"], strict=True)])


def main() -> int:
    """Command line entry."""
    parser = argument_parser(__doc__, REPETITIONS)
    parser.add_argument("--log-mib", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--checkpoint-mib", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--message-kib", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each reading")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        place = Path(folder) / "store"
        write_store(place, args.log_mib << 20, args.checkpoint_mib << 20, args.message_kib << 10)
        measured = measure(place, args.repetitions, cold=args.cold)
    source = "cold, from the disk" if args.cold else "from the page cache"
    target = Target(
        f"swift-recover verify / a plain read, {source}",
        f">= {LIMIT}",
        measured.ratio.text("", 2),
        measured.ratio.median >= LIMIT,
    )
    rows = [
        [name, one.rate.text(" GB/s", 2), one.cpu_rate.text(" GB/s", 2)]
        for name, one in (("verify", measured.verify), ("plain", measured.plain))
    ]
    rows.append(["ratio, pair by pair", measured.ratio.text("", 2), measured.cpu_ratio.text("", 2)])
    size = f"{measured.total_bytes / 1e9:.1f} GB, messages of {args.message_kib} KiB"
    body = f"{target_table([target])}\n\n{size}:\n\n{table(['', 'wall time', 'CPU time'], rows)}"
    return finish("verification", body, asdict(measured), args)


if __name__ == "__main__":
    sys.exit(main())
