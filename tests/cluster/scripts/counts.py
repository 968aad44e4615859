"""The example training, in which each worker writes what it has open when a live step begins."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import train_swift
from torch.distributed import distributed_c10d

import swift_ft

COUNTS = Path(os.environ["SWIFT_TEST_FOLDER"]) / f"counts{os.environ['RANK']}.jsonl"


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if not step.replayed:
                with COUNTS.open("a") as file:
                    print(json.dumps(counts(self.metrics().generation)), file=file)
            yield step


def counts(generation: int) -> dict[str, int]:
    return {
        "pid": os.getpid(),
        "generation": generation,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "groups": len(distributed_c10d._world.pg_map),
    }


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
