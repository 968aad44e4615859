"""Verifies a whole store: every checkpoint, every log segment, and what damage would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.checkpoint.store_claim import journal_directory
from swift_ft.checkpoint.worker_record import WorkerRecord, read_record, record_path
from swift_ft.errors import SwiftError
from swift_ft.offline.archive import read_journal
from swift_ft.offline.checkpoint_check import CheckedCheckpoint, verify_checkpoint
from swift_ft.offline.log_check import CheckedLogs, LogDamage, check_logs, read_ahead_threads
from swift_ft.offline.replay_coverage import Hole, Replay
from swift_ft.offline.replay_plan import workers_to_replay
from swift_ft.offline.run_store import RunStore
from swift_ft.storage.store import TEMPORARY_SUFFIX
from swift_ft.units import in_spans, spans_of

LOGS = "log/"
CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is damaged or missing.

    Attributes:
        path: in the store.
        what: is wrong with it.
        consequence: what can no longer be recovered, and what would happen instead.
    """

    path: str
    what: str
    consequence: str


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A committed checkpoint.

    Attributes:
        parts: how many different ones it has.
        intact: all its bytes are those that were saved.
    """

    iteration: int
    parts: int
    intact: bool


@dataclass(frozen=True, slots=True)
class WorkerOutlook:
    """The findings of one worker's replay from the store.

    Attributes:
        rank: the worker.
        stages: on it, as the logs show them; none if the logs do not.
        replicas: other workers with the same state. If one is alive, it gives its state instead.
        together: other workers that would replay with it.
        begin: the checkpoint that its replay would begin from; None if there is none for it.
        until: the iterations it would then have completed.
        remark: why it would not come to the newest iteration; empty if it would.
    """

    rank: int
    stages: tuple[int, ...]
    replicas: tuple[int, ...]
    together: tuple[int, ...]
    begin: int | None
    until: int | None
    remark: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The content of a store, and the verdict on whether all of it can be used.

    Attributes:
        url: of the store, without credentials.
        run_id: the run that owns it.
        segments: of the log, that were read.
        messages: whose payloads match their checksums.
        verified_bytes: that were read.
        newest: iterations that at least one worker has completed, as the logs show; None without logs.
        checkpoints: all committed ones, oldest first.
        workers: what a replay of each would find, by rank.
        findings: what is damaged or missing.
        notes: by path, what is neither damage nor in use.
    """

    url: str
    run_id: str
    segments: int
    messages: int
    verified_bytes: int
    newest: int | None
    checkpoints: tuple[VerifiedCheckpoint, ...]
    workers: tuple[WorkerOutlook, ...]
    findings: tuple[Finding, ...]
    notes: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def bytes_to_verify(files: Mapping[str, int]) -> int:
    """The bytes that :func:`verify_store` reads. Those of unfinished checkpoints count, too."""
    return sum(size for path, size in files.items() if path.startswith((LOGS, CHECKPOINTS)))


def verify_store(
    run: RunStore, files: Mapping[str, int], on_bytes: Callable[[int], None] = lambda count: None
) -> Verification:
    """Read all checkpoints and logs of a store, in threads. Nothing is written.

    The run may be alive: what it deletes meanwhile is not damage, and its newest checkpoint counts.

    Args:
        run: the store.
        files: bytes of all its files, by path.
        on_bytes: called with bytes that were read, in any thread.

    Raises:
        Exception: what the store's client raised, if it does not answer.
    """
    read = _Counter(on_bytes)
    threads = read_ahead_threads(run.store)
    committed = run.checkpoints.committed()
    checked = [
        verify_checkpoint(run.checkpoints, iteration, threads=threads, on_bytes=read.add)
        for iteration in committed
    ]
    logs = check_logs(
        run.store,
        {path: size for path, size in files.items() if path.startswith(LOGS)},
        run_id=run.run_id,
        earlier=run.earlier,
        on_bytes=read.add,
    )
    still = run.checkpoints.committed()
    journal = read_journal(run.store, run.run_id)
    kept = [one for one in checked if one.iteration in still]
    view = _View(run, kept, still, logs, _records(run, files))
    notes = {**_notes(run, files), **logs.notes}
    for iteration in set(still) - set(committed):
        notes[f"{CHECKPOINTS}{iteration:08d}"] = "committed while the store was verified: not verified yet"
    return Verification(
        url=run.store.url,
        run_id=run.run_id,
        segments=logs.segments,
        messages=logs.messages,
        verified_bytes=read.total,
        newest=logs.coverage.newest or None,
        checkpoints=tuple(
            VerifiedCheckpoint(one.iteration, len(one.parts), one.intact) for one in view.checked
        ),
        workers=tuple(view.outlooks()),
        findings=(*view.findings(), *(_of_journal(run, problem) for problem in journal.problems)),
        notes=dict(sorted(notes.items())),
    )


def _of_journal(run: RunStore, problem: str) -> Finding:
    consequence = "no recovery needs it: other commands can tell less about the run"
    return Finding(journal_directory(run.run_id), problem, consequence)


def _records(run: RunStore, files: Mapping[str, int]) -> dict[int, WorkerRecord]:
    """The workers' places in their pipelines. A worker without a whole record counts as rebuilt alone."""
    records = {}
    for rank in range(run.topology["machines"] * run.topology["workers"]):
        if record_path(rank) in files:
            with suppress(SwiftError, KeyError, TypeError):  # it is damaged
                records[rank] = read_record(run.store, rank)
    return {rank: record for rank, record in records.items() if record is not None}


class _Counter:
    """Adds up bytes. Each thread adds under the interpreter's lock."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._counts: list[int] = []  # appending is atomic

    def add(self, count: int) -> None:
        self._counts.append(count)
        self._on_bytes(count)

    @property
    def total(self) -> int:
        return sum(self._counts)


def _notes(run: RunStore, files: Mapping[str, int]) -> dict[str, str]:
    """Notes on files and folders that are neither committed nor damaged, by path."""
    notes = {
        path: "a temporary file of a worker that was killed, or is writing it"
        for path in files
        if path.endswith(TEMPORARY_SUFFIX) and not path.startswith(LOGS)
    }
    for folder in run.checkpoints.uncommitted():
        notes[folder] = "a checkpoint that is not committed: it is being saved, or a part was never written"
    for iteration in run.checkpoints.committed():
        for path in run.checkpoints.orphans(iteration):
            notes.setdefault(path, "left by an attempt to save this checkpoint, and no part of it")
    return notes


class _View:
    """The meaning of the checked files for a recovery."""

    def __init__(
        self,
        run: RunStore,
        checked: Sequence[CheckedCheckpoint],
        committed: Sequence[int],
        logs: CheckedLogs,
        records: Mapping[int, WorkerRecord],
    ) -> None:
        self._run = run
        self._logs = logs
        self.checked = checked
        self._newest = committed[-1] if committed else None
        damaged = {one.iteration for one in checked if one.damaged}
        self._usable = max((one for one in committed if one not in damaged), default=None)
        self._replays: Mapping[int, Replay] = logs.coverage.replays(
            self._newest or 0, {rank: workers_to_replay(records, rank) for rank in records}
        )
        newest = [one for one in checked if one.iteration == self._newest]
        self._owners = {rank: part for one in newest for part in one.parts for rank in part.ranks}
        self._marker_damaged = any(one.marker for one in newest)

    # ------------------------------------------------------------------------------------------ workers

    def outlooks(self) -> Iterator[WorkerOutlook]:
        """One for each worker that the logs or the newest checkpoint know."""
        for rank in sorted({*self._owners, *self._replays}):
            replay, part = self._replays.get(rank), self._owners.get(rank)
            lost = self._newest is None or self._marker_damaged or bool(part is not None and part.damaged)
            until, remark = self._reached(rank) if replay is not None else (None, "its log holds nothing")
            if lost:
                until, remark = None, self._why_no_begin()
            yield WorkerOutlook(
                rank,
                replay.stages if replay is not None else (),
                self._replicas(rank),
                replay.together if replay is not None else (),
                None if lost else self._newest,
                until,
                remark,
            )

    def _why_no_begin(self) -> str:
        if self._newest is None:
            return "no checkpoint is committed yet"
        what = "" if self._marker_damaged else "its part of "
        return f"{what}the checkpoint of iteration {self._newest} is damaged"

    def _replicas(self, rank: int) -> tuple[int, ...]:
        part = self._owners.get(rank)
        return tuple(other for other in part.ranks if other != rank) if part is not None else ()

    def _reached(self, rank: int) -> tuple[int, str]:
        """The iterations that a worker would have completed after its replay, and why not all."""
        replay, begin = self._replays[rank], self._newest or 0
        blocks = [damage for damage in self._logs.damages if self._blocks(damage, replay)]
        block = min(blocks, key=lambda damage: damage.iterations[0], default=None)
        if block is not None and max(begin, block.iterations[0]) <= replay.until:
            return max(begin, block.iterations[0]), f"the log of worker {block.rank} is damaged"
        if not replay.holes:
            return replay.until, ""
        hole = replay.holes[0]
        if not self._is_finding(hole):
            return replay.until, f"the log of worker {hole.writer} in the store ends there"
        if hole.writer is None:
            return replay.until, f"no log has messages of {hole.boundary}"
        return replay.until, f"the log of worker {hole.writer} lacks messages"

    def _blocks(self, damage: LogDamage, replay: Replay) -> bool:
        needed = damage.iterations[1] >= (self._newest or 0) or damage.iterations == (0, 0)
        return damage.blocks and needed and damage.rank in replay.writers

    def _is_finding(self, hole: Hole) -> bool:
        """Whether messages were lost, and are not merely not in the store yet.

        Behind a network, and where a segment is open, the end of a log is still with its writer.
        """
        at_end = self._run.store.remote or hole.writer in self._logs.unsealed
        return hole.later or (hole.sent and not at_end)

    # ----------------------------------------------------------------------------------------- findings

    def findings(self) -> Iterator[Finding]:
        """All that is damaged or missing, checkpoints first."""
        for one in self.checked:
            folder = f"{CHECKPOINTS}{one.iteration:08d}"
            if one.marker:
                yield Finding(folder, one.marker, self._without_checkpoint(one.iteration, ()))
            for part in one.parts:
                for what in part.damaged.values():
                    yield Finding(part.path, what, self._without_checkpoint(one.iteration, part.ranks))
        for damage in self._logs.damages:
            yield Finding(damage.path, damage.what, self._without_log(damage))
        for path, what in (*self._logs.coverage.mismatches, *self._logs.coverage.receipts_that_differ()):
            yield Finding(path, what, f"a replay that reads it would stop: {self._all_go_back()}")
        yield from self._lost_messages()

    def _all_go_back(self) -> str:
        if self._usable is None:
            return "no intact checkpoint is left to go back to"
        return f"all would go back to the checkpoint of iteration {self._usable}"

    def _without_checkpoint(self, iteration: int, ranks: Sequence[int]) -> str:
        if iteration != self._newest:
            if self._usable is not None and self._usable > iteration:
                return f"nothing now: the checkpoint of iteration {self._usable} is newer and intact"
            return self._all_go_back()
        if not ranks:
            return f"no worker could be replayed: {self._all_go_back()}"
        return (
            f"{_workers(ranks)} could not be replayed{self._without_replicas(ranks)}: {self._all_go_back()}"
        )

    def _without_log(self, damage: LogDamage) -> str:
        begin = self._newest or 0
        if damage.iterations[1] < begin and damage.iterations != (0, 0):
            return f"nothing now: the checkpoint of iteration {begin} is newer"
        until: dict[int, int] = {}
        for rank, replay in self._replays.items():
            first = [hole.iteration for hole in replay.holes if self._explains(damage, hole)][:1]
            if self._blocks(damage, replay):
                first.append(max(begin, damage.iterations[0]))
            if first:
                until[rank] = min(first)
        if not until:
            return "nothing now: no replay needs what is lost, or a newer copy of it is intact"
        return self._not_beyond(until)

    def _not_beyond(self, until: Mapping[int, int]) -> str:
        iteration = min(until.values())
        return (
            f"{_workers(until)} could not be replayed beyond iteration {iteration}"
            f"{self._without_replicas(until)}: {self._all_go_back()}"
        )

    def _without_replicas(self, ranks: Iterable[int]) -> str:
        """A condition, where replicas would make a replay unnecessary."""
        return " once all their replicas are lost" if all(self._replicas(rank) for rank in ranks) else ""

    def _explains(self, damage: LogDamage, hole: Hole) -> bool:
        if not damage.iterations[0] <= hole.iteration <= damage.iterations[1]:
            return False
        return hole.writer == damage.rank or (hole.writer is None and damage.rank not in self._replays)

    def _lost_messages(self) -> Iterator[Finding]:
        """Messages that are missing without a damage that would explain it: by log."""
        lost: dict[tuple[int | None, int], set[Hole]] = {}
        readers: dict[tuple[int | None, int], dict[int, int]] = {}
        for rank, replay in self._replays.items():
            for hole in replay.holes:
                explained = any(self._explains(damage, hole) for damage in self._logs.damages)
                if self._is_finding(hole) and not explained:
                    # Without a writer, each stage is one whose log is gone.
                    place = (hole.writer, -1 if hole.writer is not None else hole.boundary.source)
                    lost.setdefault(place, set()).add(hole)
                    readers.setdefault(place, {}).setdefault(rank, hole.iteration)
        for (writer, stage), holes in sorted(lost.items(), key=str):
            first, last = (pick(hole.iteration for hole in holes) for pick in (min, max))
            when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
            what = f"{sum(hole.count for hole in holes)} messages of {when} are missing"
            boundaries = "; ".join(sorted({str(hole.boundary) for hole in holes}))
            path = f"{LOGS}rank-{writer:05d}" if writer is not None else f"{LOGS}(of stage {stage})"
            yield Finding(path, f"{what} ({boundaries})", self._not_beyond(readers[writer, stage]))


def _workers(ranks: Iterable[int]) -> str:
    """``worker 2``, or ``workers 0 to 3, 5``."""
    spans = spans_of(ranks)
    alone = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"worker{'' if alone else 's'} {in_spans(spans)}"
