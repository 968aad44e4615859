"""The cost and the gain of packing the log, on the messages of a real training.

The GPT of `examples/` is trained for some iterations in four stages in one process; the activations and
gradients that cross between its stages are packed with every codec, on one core, in float32 and in bfloat16
(the model's own: the second training runs in bfloat16 from its first step).

Packing and writing overlap, so a codec pays if the store takes fewer bytes per second than
`pack MB/s`. It then saves what the ratio says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lib.results import Summary, argument_parser, finish, table
from examples.commands import finished
from swift_ft.logging import Direction, MessageKey, checksum_of
from swift_ft.logging.format.codec import Codec, pack, unpack
from swift_ft.logging.format.record import Record, RecordKind, dtype_name
from swift_ft.torch_core.tensors import tensor_bytes

TRAINING = Path(__file__).parent / "scripts" / "sent_tensors.py"
STAGES = 4
LEVELS = [(Codec.ZSTD, 1), (Codec.ZSTD, 3), (Codec.ZSTD, 9), (Codec.ZSTD_PLANES, 1), (Codec.ZSTD_PLANES, 3)]
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Measured:
    """One codec on the messages of one dtype and direction.

    Attributes:
        ratio: bytes before, by bytes after.
        pack_mb_s: of bytes before, on one core.
        unpack_mb_s: the same.
    """

    dtype: str
    direction: str
    codec: str
    level: int
    ratio: float
    pack_mb_s: Summary
    unpack_mb_s: Summary


def main() -> int:
    """Measures every codec on every kind of message and prints the report."""
    parser = argument_parser(__doc__, repetitions=5)
    parser.add_argument("--iterations", type=int, default=20, help="of training, default: %(default)s")
    parser.add_argument(
        "--messages", type=int, default=24, help="to pack, of each kind, default: %(default)s"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measure(records, codec, level, args.repetitions)
        for dtype in DTYPES
        for records in messages(dtype, args.iterations, args.messages).values()
        for codec, level in LEVELS
    ]
    body = report(results)
    return finish("packing", body, {"results": results}, args)


def messages(dtype: torch.dtype, iterations: int, count: int) -> dict[Direction, list[Record]]:
    """The last messages of a training, by direction."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        sent = Path(name) / "sent.pt"
        command = [sys.executable, str(TRAINING), "--stages", str(STAGES), "--dtype", dtype_name(dtype)]
        command += ["--iterations", str(iterations), "--messages", str(count), "--out", str(sent)]
        finished(command, Path(name) / "output.txt")
        tensors: dict[str, list[tuple[int, int, int, torch.Tensor]]] = torch.load(sent, weights_only=True)
    return {
        direction: [
            _record(MessageKey(iteration, microbatch, direction, stage, stage + 1, 0), tensor)
            for iteration, microbatch, stage, tensor in tensors[direction.name.lower()]
        ]
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    }


def _record(key: MessageKey, tensor: torch.Tensor) -> Record:
    payload = tensor_bytes(tensor.detach().clone())
    name = dtype_name(tensor.dtype)
    return Record(RecordKind.MESSAGE, key, name, tuple(tensor.shape), checksum_of(payload), payload)


def measure(records: list[Record], codec: Codec, level: int, repetitions: int) -> Measured:
    """Packs and unpacks all records, several times."""
    size = sum(record.payload.nbytes for record in records if record.payload)
    packed = [pack(record, codec, level) for record in records]
    for before, after in zip(records, packed, strict=True):
        assert checksum_of(unpack(after).payload) == before.checksum
    smaller = sum(record.payload.nbytes for record in packed if record.payload)
    first = records[0]

    def rate(action: Callable[[], object]) -> Summary:
        return Summary.of([size / 1e6 / _seconds(action) for _ in range(repetitions)])

    return Measured(
        first.dtype,
        first.key.direction,
        codec,
        level,
        size / smaller,
        rate(lambda: [pack(record, codec, level) for record in records]),
        rate(lambda: [unpack(record) for record in packed]),
    )


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report(results: list[Measured]) -> str:
    """All results as Markdown."""
    rows = [
        [
            *(one.dtype, "activations" if one.direction == Direction.FORWARD else "gradients"),
            *(f"{one.codec} {one.level}", f"{one.ratio:.2f}"),
            *(one.pack_mb_s.text("", 0), one.unpack_mb_s.text("", 0)),
        ]
        for one in results
    ]
    head = ["dtype", "messages", "codec", "ratio", "pack MB/s", "unpack MB/s"]
    return (
        "Activations and gradients between the stages of the GPT of `examples/`, on one core; medians "
        "(ranges). A codec pays where the store takes fewer MB/s than it packs.\n\n" + table(head, rows)
    )


if __name__ == "__main__":
    sys.exit(main())
