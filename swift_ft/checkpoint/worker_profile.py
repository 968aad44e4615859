"""A worker's measurements of its first iterations, kept in the store for estimates when the run is gone.

The file (`checkpoint/worker_files.py`) is written again when a checkpoint has been timed.
"""

from __future__ import annotations

import re

from swift_ft.checkpoint.worker_files import PROFILE, WorkerFiles, of_rank
from swift_ft.costs.job import Worker
from swift_ft.plain import from_plain
from swift_ft.storage.read_only import read_at_once

_NAME = re.compile(rf"rank-\d{{5,}}\.{PROFILE}\.json")


def read_profiles(files: WorkerFiles, world_size: int) -> dict[int, Worker]:
    """The measurements of a run's workers, by rank. Those without a whole file are missing.

    Raises:
        Exception: what the store's client raised.
    """
    there = {*files.names(_NAME)}
    names = {rank: name for rank in range(world_size) if (name := of_rank(rank, PROFILE)) in there}
    read = zip(names, read_at_once(files.find, names.values()), strict=True)
    return {rank: from_plain(Worker, plain) for rank, plain in read if plain is not None}
