"""The file in a store that records one process's part in a recovery (`observe/spans.py`).

`checkpoint/worker_files.py` says where. Its name has the generation that went live.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from swift_ft.checkpoint.worker_files import WorkerFiles, of_rank
from swift_ft.observe.spans import Recording

_NAME = re.compile(r"(?:rank-\d{5,}|agent-.+)\.g(\d{4,})\.trace\.json")


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """The part of one process.

    Attributes:
        run_id: the run.
        generation: that went live.
        by: the participant, in words, as in the journal.
        rank: of a worker; None for an agent.
        machine: its machine.
        slot: of the machine; None for one that is a spare.
        clock: names the monotonic clock: equal for all processes that share it.
        recording: what it did.
    """

    run_id: str
    generation: int
    by: str
    rank: int | None
    machine: str
    slot: int | None
    clock: str
    recording: Recording

    @property
    def file(self) -> str:
        """Its name."""
        what = f"g{self.generation:04d}.trace"
        return f"agent-{self.machine}.{what}.json" if self.rank is None else of_rank(self.rank, what)


def clock_of_host() -> str:
    """A name for the monotonic clock of this process: the boot of the host, and a namespace of time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"  # noqa: PTH115  (it is no path)
    except OSError:  # another system: a clock of its own, as far as anyone knows
        return f"process {os.getpid()} of {os.uname().nodename}"


def recording_names(files: WorkerFiles, generations: Collection[int] | None = None) -> list[str]:
    """The files of the recoveries after which these generations went live; of all without any."""
    found = ((name, _NAME.fullmatch(name)) for name in files.names(_NAME))
    return [name for name, of in found if generations is None or (of and int(of[1]) in generations)]
