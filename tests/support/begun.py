"""Which steps the workers of a test script have begun: files in the test's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

import swift_ft
from tests.support.waiting import wait_until


class Session(swift_ft.Session):
    """Notes each step that it yields."""

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        """As the session does."""
        for step in super().steps(iterations):
            _file(dist.get_rank(), step.index).touch()
            yield step


def wait_until_begun(iteration: int, ranks: Iterable[int]) -> None:
    """Wait until these workers have begun an iteration, and so completed the one before."""
    files = [_file(rank, iteration) for rank in ranks]
    wait_until(lambda: all(file.exists() for file in files), f"not all of {files} are there")


def _file(rank: int, iteration: int) -> Path:
    return Path(os.environ["SWIFT_TEST_FOLDER"]) / f"begun-{rank}-{iteration}"
