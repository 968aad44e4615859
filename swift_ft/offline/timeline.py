"""A run from its beginning to its end: recoveries, who held what, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_history import HISTORIES, GenerationWork, WorkerHistory
from swift_ft.offline.archive import ArchivedJournal, read_journal
from swift_ft.offline.lost_time import CAUSE_OF_PHASE, Cause, Goodput, Works, account, regrouped
from swift_ft.offline.recovery_spans import TracedRecovery, read_recordings, trace_recoveries
from swift_ft.offline.run_store import RunStore, store_errors
from swift_ft.recovery import events as ev
from swift_ft.recovery.history import StateChange
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.memory import newest_in_memory
from swift_ft.recovery.occupancy import Occupancy, occupancy
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.recoveries import Recovery
from swift_ft.recovery.world_changes import WorldChange
from swift_ft.storage.read_only import read_all


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One recovery, and what it took.

    Attributes:
        number: from 1.
        recovery: what the journal tells.
        back: when the last worker began its first step after it; None if no worker noted that.
        seconds: by cause, from the detection until ``back``, or as far as the run is known.
        total_s: the sum.
        traced: what each process did in it; None if it did not end, or before a gap in the journal.
    """

    number: int
    recovery: Recovery
    back: float | None
    seconds: Mapping[Cause, float]
    total_s: float
    traced: TracedRecovery | None


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """One worker's work in the whole run, all its processes together.

    Attributes:
        rank: the worker.
        known: it noted anything. If not, all else is 0.
        at_least: one of its processes was killed or stopped, or may live, and so did more than it had noted.
        iteration: up to which completed iteration its notes reach.
        steps: live steps.
        replayed: replayed steps.
        replay_s: time in these.
        log_messages: messages logged.
        log_bytes: their payload.
        held_back_s: time that its training waited for room in the log's budget.
        saving_s: time that its training stood still for checkpoints.
    """

    rank: int
    slot: int
    known: bool
    at_least: bool
    iteration: int
    steps: int
    replayed: int
    replay_s: float
    log_messages: int
    log_bytes: int
    held_back_s: float
    saving_s: float


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A commit: the iteration, and when the journal had it, in Unix seconds."""

    iteration: int
    at: float


@dataclass(frozen=True, slots=True)
class FoundMemoryCheckpoint:
    """A memory checkpoint as the workers reported it in a recovery. In a steady run nobody tells of them.

    Attributes:
        iteration: the newest of which living machines had all parts.
        at: when the last worker had reported, in Unix seconds.
        used: all workers went back to it.
    """

    iteration: int
    at: float
    used: bool


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """A run over time. Times are Unix seconds.

    Attributes:
        run_id: the run.
        runs: all in the store, oldest first.
        machines: slots of the job.
        workers_per_machine: on each.
        phase: the last known one; ``unknown`` without a journal.
        ok: how it ended; None if no end is known.
        reason: why it ended.
        ended: when; None if no end is known. With a gap in the journal that may be after ``until``.
        began: its first entry; None without a journal.
        until: up to when it is known: its end, a gap in the journal, or the last sign of life.
        goodput: where the time went.
        recoveries: all of them.
        occupancy: who held what and did what.
        totals: over all workers.
        checkpoints: that were committed, in order of time.
        memory_checkpoints: that were found in recoveries, in order of time.
        worlds: changes to other worlds that were planned.
        sharded: the model was sharded over workers.
        problems: damage and gaps, one line each.
        unknown: what cannot be told, and what that means for the numbers, one line each.
    """

    url: str
    run_id: str
    runs: tuple[str, ...]
    machines: int
    workers_per_machine: int
    phase: str
    ok: bool | None
    reason: str
    ended: float | None
    began: float | None
    until: float | None
    entries: int
    goodput: Goodput
    recoveries: tuple[RecoveryReport, ...]
    occupancy: Occupancy
    totals: tuple[WorkerTotals, ...]
    checkpoints: tuple[CommittedCheckpoint, ...]
    memory_checkpoints: tuple[FoundMemoryCheckpoint, ...]
    worlds: tuple[WorldChange, ...]
    sharded: bool
    problems: tuple[str, ...]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def run_timeline(
    run: RunStore, run_id: str | None = None, on_file: Callable[[int], None] = lambda count: None
) -> RunTimeline:
    """Read a run's journal and its workers' histories. Reads no log and no checkpoint.

    Args:
        run: a store.
        run_id: one of its runs; the newest by default.
        on_file: called with the number of files that were read since the last call.

    Raises:
        UsageError: there is no such run, or the store cannot be read.
    """
    run_id = run.named(run_id)
    journal = read_journal(run.store, run_id, on_file)
    files = WorkerFiles(run.store, run_id)
    with store_errors(run.store):
        names = files.names(HISTORIES)
        histories, damage = read_all(lambda name: files.read(WorkerHistory, name), names, on_file)
    changes, history = list(journal.changes()), journal.history
    state, verdict = history.state, journal.verdict
    works = _by_generation(histories)
    signs = [at for group in works.values() for _, work in group for at in _times(work)]
    began = {
        (rank, number): work.began
        for number, group in works.items()
        for rank, work in group
        if work.began is not None
    }
    whole = len(changes) == len(journal.entries)  # what happened in a gap is unknown
    occupied = occupancy(changes, began, until=max(signs, default=0.0) if whole else 0.0)
    found = history.recoveries
    ended = {recovery.generation for recovery in found if recovery.live is not None}
    with store_errors(run.store):
        recordings, torn = read_recordings(run.store, run_id, ended, on_file)
    traced = trace_recoveries(history.courses, recordings)
    return RunTimeline(
        url=run.store.url,
        run_id=run_id,
        runs=(*run.earlier, run.run_id),
        machines=state.shape.machines,
        workers_per_machine=state.shape.workers_per_machine,
        phase=state.phase.value if changes else "unknown",
        ok=verdict.ok if verdict is not None else None,
        reason=verdict.reason if verdict is not None else "",
        ended=journal.entries[-1].at if verdict is not None else None,
        began=occupied.phases[0].since if occupied.phases else None,
        until=occupied.phases[-1].until if occupied.phases else None,
        entries=len(journal.entries),
        goodput=account(occupied, found, works, history.worlds),
        recoveries=tuple(_reports(found, occupied, works, traced)),
        occupancy=occupied,
        totals=tuple(_totals(state, occupied, histories)),
        checkpoints=tuple(
            CommittedCheckpoint(change.entry.event.iteration, change.entry.at)
            for change in changes
            if isinstance(change.entry.event, ev.CheckpointCommitted)
        ),
        memory_checkpoints=tuple(_memory_checkpoints(changes)),
        worlds=tuple(history.worlds),
        sharded=bool(run.topology.get("sharded")),
        problems=(*journal.shortcomings, *damage, *torn),
        unknown=tuple(_unknown(journal, state, occupied, works, len(changes))),
    )


def _memory_checkpoints(changes: Iterable[StateChange]) -> Iterator[FoundMemoryCheckpoint]:
    for change in changes:
        before, plan = change.before, change.after.plan
        if plan is None or before.plan is not None or not isinstance(change.entry.event, ev.StatusReported):
            continue
        reports = {**before.round.statuses, change.entry.event.rank: change.entry.event}
        if (found := newest_in_memory(reports)) is not None:
            used = plan.mode == RecoveryMode.MEMORY and plan.resume == found.iteration
            yield FoundMemoryCheckpoint(found.iteration, change.entry.at, used)


def _by_generation(histories: Sequence[WorkerHistory]) -> Works:
    found: dict[int, list[tuple[int, GenerationWork]]] = defaultdict(list)
    for history in histories:
        for work in history.generations:
            found[work.generation].append((history.rank, work))
    return found


def _times(work: GenerationWork) -> Iterator[float]:
    for at in (work.began, work.until, work.interrupted):
        if at is not None:
            yield at


def _reports(
    found: Sequence[Recovery], occupied: Occupancy, works: Works, traced: Mapping[int, TracedRecovery]
) -> Iterator[RecoveryReport]:
    for number, recovery in enumerate(found, 1):
        end = recovery.live if recovery.live is not None else occupied.phases[-1].until
        seconds: dict[Cause, float] = {}
        for span in occupied.phases:
            shared = min(span.until, end) - max(span.since, recovery.detected)
            if shared > 0 and span.phase in CAUSE_OF_PHASE:
                cause = CAUSE_OF_PHASE[span.phase]
                seconds[cause] = seconds.get(cause, 0.0) + shared
        back = None
        group = works.get(recovery.generation, ())
        if recovery.live is not None and any(work.began is not None for _, work in group):
            back = regrouped(recovery.live, occupied.phases[-1].until, group)
            seconds[Cause.REGROUPING] = back - recovery.live
        course = traced.get(recovery.generation) if recovery.live is not None else None
        yield RecoveryReport(number, recovery, back, seconds, sum(seconds.values()), course)


def _totals(state: State, occupied: Occupancy, histories: Sequence[WorkerHistory]) -> Iterator[WorkerTotals]:
    lost = {place.slot for place in occupied.tenures if place.end == "lost"}
    finished = state.verdict is not None and state.verdict.ok  # else workers were stopped, or still work
    for rank in range(state.world_size):
        works = [work for one in histories if one.rank == rank for work in one.generations]
        yield WorkerTotals(
            rank=rank,
            slot=state.slot_of_rank(rank),
            known=bool(works),
            at_least=bool(works) and (not finished or state.slot_of_rank(rank) in lost),
            iteration=max((work.iteration for work in works), default=0),
            steps=sum(work.steps for work in works),
            replayed=sum(work.replayed for work in works),
            replay_s=sum(work.replay_s for work in works),
            log_messages=sum(work.log_messages for work in works),
            log_bytes=sum(work.log_bytes for work in works),
            held_back_s=sum(work.held_back_s for work in works),
            saving_s=sum(work.saving_s for work in works),
        )


def _unknown(
    journal: ArchivedJournal, state: State, occupied: Occupancy, works: Works, read: int
) -> Iterator[str]:
    if journal.entries and read < len(journal.entries):
        lost = [entry for entry in journal.entries[read:] if isinstance(entry.event, ev.MachineLost)]
        yield (
            f"what follows entry {read - 1} of the journal, because entries are missing there: all numbers "
            f"end before the gap (the {len(journal.entries) - read} entries after it report {len(lost)} "
            "lost machines)"
            if read
            else "everything: the first entries of the journal are missing"
        )
    if state.verdict is None and read == len(journal.entries) and read:
        yield "what happened after the last sign of life: no end of this run is archived"
    live = [span.generation for span in occupied.phases if span.phase == Phase.LIVE]
    silent = [str(generation) for generation in live if generation not in works]
    if silent:
        yield (
            f"in generation{'s' * (len(silent) > 1)} {', '.join(silent)}, when steps began, and what they "
            "waited for: no worker noted it, so regrouping, held-back time and saving count as training there"
        )
    if any(isinstance(entry.event, ev.ScriptFailed) for entry in journal.entries[:read]):
        yield "how many iterations a restart of the failed script repeated: they count as training"
