"""The file in a store that records one process's part in a recovery (`observe/spans.py`).

runs/<run>/workers/rank-00003.g0002.trace.json          of a worker, for the generation that went live
runs/<run>/workers/agent-m-1a2b3c4d.0.g0002.trace.json  of an agent that had something to do
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from swift_ft.checkpoint.store_claim import history_directory
from swift_ft.checkpoint.worker_history import read_sealed
from swift_ft.observe.spans import Recording
from swift_ft.plain import from_plain
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store

_NAME = re.compile(r"(rank-\d{5,}|agent-.+)\.g(\d{4,})\.trace\.json")


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


def clock_of_host() -> str:
    """A name for the monotonic clock of this process: the boot of the host, and a namespace of time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"  # noqa: PTH115  (it is no path)
    except OSError:  # another system: a clock of its own, as far as anyone knows
        return f"process {os.getpid()} of {os.uname().nodename}"


def write_recording(store: Store, stored: StoredRecording) -> None:
    """Write the part of a process."""
    who = f"rank-{stored.rank:05d}" if stored.rank is not None else f"agent-{stored.machine}"
    name = f"{who}.g{stored.generation:04d}.trace.json"
    store.write_json(f"{history_directory(stored.run_id)}/{name}", sealed(asdict(stored)))


def recording_names(store: Store, run_id: str, generations: Collection[int] | None = None) -> list[str]:
    """The files of the recoveries after which these generations went live; of all without any."""
    names = ((name, _NAME.fullmatch(name)) for name in store.list(history_directory(run_id)))
    found = ((name, int(of[2])) for name, of in names if of is not None)
    return sorted(name for name, generation in found if generations is None or generation in generations)


def read_recording(store: Store, run_id: str, name: str) -> StoredRecording:
    """Read one of them.

    Raises:
        SwiftError: it is not what was written, or it is gone.
    """
    return from_plain(StoredRecording, read_sealed(store, run_id, name))
