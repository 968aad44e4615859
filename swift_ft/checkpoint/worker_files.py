"""The files in which a run's workers and agents note what they are and did, each with its own digest.

runs/<run>/workers/rank-00003.g0001.json                  its work: of the process that generation 1 started
                   rank-00003.g0002.trace.json            its part in the recovery of generation 2
                   agent-m-1a2b3c4d.0.g0002.trace.json    of an agent that had something to do in it
                   rank-00003.profile.json                measurements of its first iterations
                   rank-00003.setup.json                  what its script communicated before the first step
                   rank-00003.gradients.json              its own gradients of some steps, as digests

No recovery needs them: they are for tools that look when the run is gone, and for spares that audit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from swift_ft.checkpoint.run_record import run_directory
from swift_ft.errors import SwiftError
from swift_ft.plain import from_plain
from swift_ft.storage.digest import sealed
from swift_ft.storage.sealed_file import read_whole
from swift_ft.storage.store import Store

PROFILE, SETUP, GRADIENTS = "profile", "setup", "gradients"
"""Files of which a worker has one, whichever of its processes writes it."""

_BY_WORKER = re.compile(r"rank-(\d{5,})\.g(\d{4,})\.(?:trace\.)?json")
_BY_AGENT = re.compile(r"agent-(.+)\.g\d{4,}\.trace\.json")
_OF_ANY_PROCESS = re.compile(rf"rank-(\d{{5,}})\.(?:{PROFILE}|{GRADIENTS}|{SETUP})\.json")

T = TypeVar("T")


def of_rank(rank: int, what: str) -> str:
    """The name of a worker's file."""
    return f"rank-{rank:05d}.{what}.json"


def write_for_tools(store: Store, path: str, content: dict[str, Any]) -> None:
    """Write or replace a file of a worker that only tools read: once more if worker 0 deletes it meanwhile.

    At the end that deletes what is begun and may be a killed process's: not all names say whose they are.
    """
    try:
        store.write_json(path, content)
    except FileNotFoundError:
        store.write_json(path, content)


class WorkerFiles:
    """The files of one run. From any thread.

    Attributes:
        folder: in the store.

    Args:
        store: where they are.
        run_id: the run.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._of_run = run_directory(run_id)
        self.folder = f"{self._of_run}/workers"

    def path(self, name: str) -> str:
        """The place of a file in the store."""
        return f"{self.folder}/{name}"

    def names(self, pattern: re.Pattern[str]) -> list[str]:
        """The files with such names, in order."""
        return sorted(name for name in self._store.list(self.folder) if pattern.fullmatch(name))

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write or replace a file."""
        write_for_tools(self._store, self.path(name), sealed(content))

    def read(self, kind: type[T], name: str) -> T:
        """An object of a dataclass from a file that was written with its ``asdict()``.

        Raises:
            SwiftError: it is not what was written, or it is gone.
        """
        content, damage = read_whole(self._store, path := self.path(name))
        if content is None:
            raise SwiftError(f"the file {path} {damage}", path=path)
        return from_plain(kind, content)

    def find(self, name: str) -> dict[str, Any] | None:
        """The content of a file; None if it is not there, or damaged."""
        return read_whole(self._store, self.path(name))[0]

    def sweep(
        self, started_in: Mapping[int, int], machines: Collection[str] = (), workers: int | None = None
    ) -> None:
        """Remove what killed processes left that were writing. Those that live may write meanwhile.

        What worker 0 says of the whole run beside this folder may have been left unfinished as well.

        Args:
            started_in: by rank, the generation in which the worker's present process was started.
            machines: whose agents live.
            workers: of the job, which may have had more before; None if that is unknown.
        """

        def is_dead(name: str) -> bool:
            if agent := _BY_AGENT.match(name):
                return agent[1] not in machines
            of_any = _OF_ANY_PROCESS.match(name)
            found = of_any or _BY_WORKER.match(name)
            if found is None:
                return False
            rank = int(found[1])
            if workers is not None and rank >= workers:
                return True
            # Such a name does not say of which process the file is: one that lives writes it once more.
            return started_in.get(rank, 1) > 1 if of_any else int(found[2]) < started_in.get(rank, 0)

        self._store.sweep(self.folder, is_dead)
        if started_in.get(0, 1) > 1:  # not with `sweep`, which ends uploads below: others write there
            for name in self._store.temporary_files(self._of_run):
                self._store.delete(f"{self._of_run}/{name}")
