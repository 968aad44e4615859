"""How fast a replay unpacks the log on this machine's CPU: messages of a training in bfloat16, on one core.

The codecs and the messages are those of `benchmarks/logging/codec.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.part import Part, figure, run_part
from benchmarks.lib.results import Target
from benchmarks.logging.codec import measure as measure_codec
from benchmarks.logging.codec import messages
from swift_ft.logging.format.codec import Codec

CODECS = [(Codec.ZSTD, 1), (Codec.ZSTD_PLANES, 1)]


def measure(part: Part) -> Iterator[Target]:
    """Each codec, on messages of both directions."""
    torch.set_num_threads(1)
    repetitions = 2 if part.small else 5
    for direction, records in messages(torch.bfloat16, 2, 8).items():
        for codec, level in CODECS:
            one = measure_codec(records, codec, level, repetitions)
            name = f"unpacking {direction.name.lower()} messages, {codec} {level}"
            yield figure(name, f"{one.unpack_mb_s.text('', 0)} MB/s, {one.ratio:.2f} times smaller")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, measure))
