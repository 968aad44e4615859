"""A worker's history in the store: its work in each generation, for tools that look when the run is gone.

runs/<run>/workers/rank-00003.g0001.json    of the process that was started in generation 1, with a digest

The file is written again whenever the worker begins to train in a generation, saves a checkpoint, is
interrupted, or ends. A worker that is killed leaves what it had written before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.checkpoint.run_record import run_directory
from swift_ft.checkpoint.store_claim import history_directory
from swift_ft.errors import SwiftError
from swift_ft.plain import from_plain
from swift_ft.storage.digest import sealed
from swift_ft.storage.sealed_file import read_whole
from swift_ft.storage.store import Store

_NAME = re.compile(r"rank-(\d{5,})\.g(\d{4,})\.json")
_BY_WORKER = re.compile(r"rank-(\d{5,})\.g(\d{4,})\.(?:trace\.)?json")
_BY_AGENT = re.compile(r"agent-(.+)\.g\d{4,}\.trace\.json")
_OF_ANY_PROCESS = re.compile(r"rank-(\d{5,})\.(?:profile|gradients|setup)\.json")


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """One worker's work in one generation, as far as it is known.

    Attributes:
        generation: the membership that it worked in.
        began: when its first live step began, in Unix seconds by its own clock; None if none did.
        until: when its last live step ended; None if none did.
        steps: live steps that it completed.
        iteration: iterations that its state had completed after the last step.
        interrupted: when the step began that an interruption ended; None if there was none.
        held_back_s: how long its live steps waited for room in the log's budget.
        saving_s: how long its training stood still for checkpoints: to copy the state, and to take digests.
        log_messages: messages that it logged, also in a replay.
        log_bytes: their payload.
        replayed: steps of a replay.
        replay_s: time in these.
    """

    generation: int
    began: float | None = None
    until: float | None = None
    steps: int = 0
    iteration: int = 0
    interrupted: float | None = None
    held_back_s: float = 0.0
    saving_s: float = 0.0
    log_messages: int = 0
    log_bytes: int = 0
    replayed: int = 0
    replay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """The work of one process.

    Attributes:
        run_id: the run.
        rank: the worker.
        started_in: the generation in which the process was started.
        generations: in order, those in which it took a step.
    """

    run_id: str
    rank: int
    started_in: int
    generations: tuple[GenerationWork, ...]


def write_history(store: Store, history: WorkerHistory) -> None:
    """Write or replace the history of a process."""
    name = f"rank-{history.rank:05d}.g{history.started_in:04d}.json"
    store.write_json(f"{history_directory(history.run_id)}/{name}", sealed(asdict(history)))


def history_names(store: Store, run_id: str) -> list[str]:
    """The files of all processes of a run that took a step."""
    return sorted(name for name in store.list(history_directory(run_id)) if _NAME.fullmatch(name))


def read_history(store: Store, run_id: str, name: str) -> WorkerHistory:
    """Read one of them.

    Raises:
        SwiftError: it is not what was written, or it is gone.
    """
    return from_plain(WorkerHistory, read_sealed(store, run_id, name))


def read_sealed(store: Store, run_id: str, name: str) -> dict[str, Any]:
    """The content of a file that a process of a run wrote with a digest.

    Raises:
        SwiftError: it is not what was written, or it is gone.
    """
    path = f"{history_directory(run_id)}/{name}"
    content, damage = read_whole(store, path)
    if content is None:
        raise SwiftError(f"the file {path} {damage}", path=path)
    return content


def sweep_histories(
    store: Store,
    run_id: str,
    started_in: Mapping[int, int],
    machines: Collection[str] = (),
    workers: int | None = None,
) -> None:
    """Remove what killed workers left that were writing. Those that live may write meanwhile.

    What a lost worker measured may have been left unfinished as well, what it or its agent did in a recovery
    (`checkpoint/recording_file.py`), and what worker 0 says of the whole run beside their folder.

    Args:
        run_id: the run.
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
        # Such a name does not say of which process the file is.
        return started_in.get(rank, 1) > 1 if of_any else int(found[2]) < started_in.get(rank, 0)

    store.sweep(history_directory(run_id), is_dead)
    if started_in.get(0, 1) > 1:  # not with `sweep`, which ends uploads below: others write there
        for name in store.temporary_files(run_directory(run_id)):
            store.delete(f"{run_directory(run_id)}/{name}")
