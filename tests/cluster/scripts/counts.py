"""The example training, in which each worker writes what it has open when a live step begins."""

import json
import os
import time
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
        "descriptors": least("fd"),
        "threads": least("task"),
        "groups": len(distributed_c10d._world.pg_map),
    }


def least(folder: str) -> int:
    """Of some looks: what a recovery has used is closed beside the next steps."""
    found = []
    for _ in range(10):
        found.append(len([*Path("/proc/self", folder).iterdir()]))
        time.sleep(0.05)
    return min(found)


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
