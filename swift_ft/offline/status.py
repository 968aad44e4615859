"""The status of a run by its store alone: where it stands, and what it would lose now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.logging import parse_segment_name
from swift_ft.offline.archive import ArchivedJournal, read_journal
from swift_ft.offline.journal_gaps import Later
from swift_ft.offline.loss import LossPlan, LossPlanner, Outcome
from swift_ft.offline.run_store import RunStore, store_errors
from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import has_replicas, interval_of
from swift_ft.recovery.audits import Wrong
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.regrowth import missing_of
from swift_ft.recovery.world_changes import WorldChange
from swift_ft.storage.files import FileFacts
from swift_ft.units import counted, named, spans_of

_WAYS = {
    RecoveryMode.REPLICA: "replica",
    RecoveryMode.REPLAY: "replay",
    RecoveryMode.MEMORY: "memory",
    RecoveryMode.START: "checkpoint",
    RecoveryMode.FALLBACK: "checkpoint",
}


@dataclass(frozen=True, slots=True)
class LogCoverage:
    """The iterations since the last committed checkpoint that a log has in complete segments.

    Attributes:
        spans: the first and the last iteration of each stretch.
        gaps: the first and the last iteration of each stretch that is missing before the end of the last one.
    """

    spans: tuple[tuple[int, int], ...]
    gaps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StoredLog:
    """One worker's log in the store.

    Attributes:
        rank: the worker.
        size_bytes: over all its files.
        coverage: by its complete segments.
    """

    rank: int
    size_bytes: int
    coverage: LogCoverage


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """One machine, and what its loss would cost.

    Attributes:
        machine: its slot.
        name: under which it joined; empty if the slot is empty or the journal does not say.
        address: where other machines watch it; empty if it is not watched any more.
        loss: what the run would do without it; None if the run has ended, or never trained.
        way: ``replica``, ``replay``, ``checkpoint`` (all workers go back), ``from the beginning``, or
            ``none`` (the run would end); empty without ``loss``.
    """

    machine: int
    name: str
    address: str
    logs: tuple[StoredLog, ...]
    loss: LossPlan | None
    way: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run.

    Attributes:
        run_id: the newest run in it.
        earlier: the runs that it continued, oldest first.
        topology: machines, workers per machine, and stages.
        phase: of the job; ``unknown`` without a journal, and after a gap in it.
        recoveries: how many there were, this run's only, up to the first gap in its journal.
        ok: whether it ended well; None if no end is archived.
        reason: why it ended; empty if no end is archived.
        sign_of_life_s: seconds since the newest entry of the journal, or the newest file of a log or
            checkpoint, was written; None if nothing was. A machine that died leaves no other trace than this.
        checkpoints: iterations of all committed checkpoints, oldest first.
        checkpoint_age_s: seconds since the newest of them was committed; None without one.
        iteration: the newest iteration that the store knows of. The run may be ahead of it.
        checkpoint_every: iterations from one checkpoint to the next; None if it was not noted.
        checkpoint_bytes: over all checkpoints.
        log_bytes: of all logs in the store.
        log_budget_bytes: limit of each worker's log; None for no limit, or if it was not noted.
        machines: by slot.
        spares: machines that wait.
        audits: what spares have found out about the checkpoints (`--audit`), one line each.
        wrong: steps that came out unlike when they were computed again, one line each.
        worlds: the last change to another world, in a line; empty if none was planned.
        smaller: the size that losses have taken from the job, in a line; empty if they have not.
        problems: what is missing or damaged, one line each.
    """

    url: str
    run_id: str
    earlier: tuple[str, ...]
    topology: dict[str, Any]
    phase: str
    generation: int
    recoveries: int
    ok: bool | None
    reason: str
    sign_of_life_s: float | None
    checkpoints: tuple[int, ...]
    checkpoint_age_s: float | None
    iteration: int
    checkpoint_every: int | None
    checkpoint_bytes: int
    log_bytes: int
    log_budget_bytes: int | None
    machines: tuple[MachineStatus, ...]
    spares: tuple[str, ...]
    audits: tuple[str, ...]
    wrong: tuple[str, ...]
    worlds: str
    smaller: str
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Files:
    logs: dict[str, FileFacts]
    checkpoints: dict[str, FileFacts]

    def newest(self) -> float | None:
        found = [file.modified for files in (self.logs, self.checkpoints) for file in files.values()]
        return max((at for at in found if at is not None), default=None)


def run_status(
    run: RunStore, now: float | None = None, on_file: Callable[[int], None] = lambda count: None
) -> RunStatus:
    """The status of a store's newest run. Reads names and the journal, no log and no checkpoint.

    Args:
        run: its store.
        now: Unix seconds; the present by default.
        on_file: called with the number of files that were read since the last call, by any thread.

    Raises:
        UsageError: the store cannot be read.
    """
    now = time.time() if now is None else now
    journal = read_journal(run.store, run.run_id, on_file)
    files, checkpoints = _files(run)
    state, later = journal.last_state(), journal.after_gaps()
    run = _of_present_world(run, state)
    verdict = journal.verdict
    committed = checkpoints[-1] if checkpoints else None
    logs = dict(_logs(run, state, files, committed or 0))
    iteration = max(committed or 0, newest_iteration(run, journal, files.logs))
    signs = [entry.at for entry in journal.entries[-1:]]
    signs += [at for at in [files.newest()] if at is not None]
    committed_at = _committed_at(files, committed) if committed is not None else None
    return RunStatus(
        url=run.store.url,
        run_id=run.run_id,
        earlier=run.earlier,
        topology=run.topology,
        phase=_phase(state, later) if journal.entries else "unknown",
        generation=state.generation if later is None else later.generation,
        recoveries=len(journal.history.recoveries),
        ok=verdict.ok if verdict is not None else None,
        reason=verdict.reason if verdict is not None else "",
        sign_of_life_s=max(0.0, now - max(signs)) if signs else None,
        checkpoints=tuple(checkpoints),
        checkpoint_age_s=None if committed_at is None else max(0.0, now - committed_at),
        iteration=iteration,
        checkpoint_every=run.settings.get("checkpoint_every"),
        checkpoint_bytes=sum(file.size for file in files.checkpoints.values()),
        log_bytes=sum(log.size_bytes for log in logs.values()),
        log_budget_bytes=run.settings.get("log_disk_bytes"),
        machines=tuple(_machines(run, journal, state, logs, iteration, ended=verdict is not None)),
        spares=tuple(state.membership.waiting()),
        audits=tuple(_audits(state)),
        wrong=tuple(_wrong(state)),
        worlds=_worlds(journal.history.worlds),
        smaller=_smaller(state),
        problems=journal.shortcomings,
    )


def _audits(state: State) -> Iterator[str]:
    """The marks of checkpoints that are still there, and the audit that runs."""
    alone = has_replicas(state)
    for mark in state.audits.marks:
        if mark.until in state.checkpoints.kept:
            whom = (
                "all machines" if mark.whole else named("machine", mark.clean) if mark.clean else "no machine"
            )
            what = f"the step after {mark.begin} is audited" if alone else f"audited from {mark.begin} on"
            yield f"checkpoint {mark.until}: {what} for {whom}"
    if (interval := interval_of(state)) is not None:
        clean = f"so far {named('machine', sorted(state.audits.clean))}" if state.audits.clean else "begun"
        differs = "".join(
            f"; machine {slot} differs in iteration {finding.iteration}, which another replay judges"
            for slot, finding in sorted(state.audits.findings.items())
        )
        yield f"checkpoint {interval.until}: audit from {interval.begin} on, {clean}{differs}"


def _wrong(state: State) -> Iterator[str]:
    """Whoever computed wrong, by verified steps and by audits."""
    for step in state.differed:
        slots = sorted({state.slot_of_rank(rank) for rank in step.ranks})
        machines = named("machine", slots) if slots else "the way between machines"
        counts = "the result that came out twice counts" if step.right else "its result may be wrong"
        yield f"iteration {step.iteration} differed on {machines} ({step.kind}): {step.tensors}; {counts}"
    for one in state.audits.judged:
        who = {
            Wrong.MACHINE: f"machine {one.slot} was wrong",
            Wrong.SEVERAL: f"one of {named('machine', one.slots)} was wrong",
            Wrong.LINK: f"what machine {one.slot} sent arrived as something else",
            Wrong.SPARE: f"spare {one.spares[0]} was wrong",
            Wrong.NOBODY: "nothing shows who was wrong",
            Wrong.UNDECIDED: "and it could not be computed once more, so nothing shows who was wrong",
        }[one.wrong]
        yield f"iteration {one.iteration} of machine {one.slot} differed in an audit, {who}: {one.tensors}"


def _smaller(state: State) -> str:
    if not (missing := missing_of(state)):
        return ""
    lost = counted(len(missing), "machine")
    return f"losses have made it smaller by {lost}: it goes back to {missing.stop} as others come"


def _worlds(changes: Sequence[WorldChange]) -> str:
    """The last change to another world, in a line."""
    if not changes:
        return ""
    last = changes[-1]
    size = counted(len(last.machines), "machine")
    if last.ended is not None:
        return f"world {last.world}, on {size}, was given up: {last.given_up}"
    if last.switched is not None:
        return f"world {last.world} trains on {size} since iteration {last.iteration}"
    how = "is prepared" if last.prepared is not None else "prepares"
    return f"world {last.world}, on {size}, {how}"


def newest_iteration(
    run: RunStore, journal: ArchivedJournal, logs: Mapping[str, FileFacts] | None = None
) -> int:
    """The newest iteration that some worker has begun, as far as the store knows.

    Args:
        run: the store.
        logs: the files below the logs' directory; None to look.

    Raises:
        UsageError: the store cannot be read.
    """
    names = logs if logs is not None else _files(run)[0].logs
    segments = [parse_segment_name(path) for path in names]
    found = [0, *(segment.max_iteration for segment in segments if segment is not None)]
    for entry in journal.entries:
        if isinstance(entry.event, ev.StatusReported | ev.PartPersisted | ev.ScriptExited):
            found.append(entry.event.iteration or 0)
    return max(found)


def _of_present_world(run: RunStore, state: State) -> RunStore:
    """The run with the machines of its present world: its record is written when that has taken over."""
    if not state.worlds.present.number:
        return run
    return replace(run, topology={**run.topology, "machines": state.shape.machines})


def _phase(state: State, later: Later | None) -> str:
    if later is None:
        return state.phase.value
    return Phase.ENDED.value if later.verdict is not None else "unknown"


def _files(run: RunStore) -> tuple[_Files, list[int]]:
    store = run.store
    with store_errors(store):
        return _Files(store.find("log"), store.find("checkpoints")), run.checkpoints.committed()


def _logs(run: RunStore, state: State, files: _Files, committed: int) -> Iterator[tuple[int, StoredLog]]:
    topology = run.topology
    for rank in range(topology["machines"] * topology["workers"]):
        folder = log_directory(rank).partition("/")[2] + "/"
        own = {path: file for path, file in files.logs.items() if path.startswith(folder)}
        segments = [segment for segment in map(parse_segment_name, own) if segment is not None]
        covered = {
            iteration
            for segment in segments
            if segment.generation >= state.checkpoints.log_since
            for iteration in range(max(committed, segment.min_iteration), segment.max_iteration + 1)
        }
        missing = {*range(committed, max(covered, default=committed - 1) + 1)} - covered
        coverage = LogCoverage(tuple(spans_of(covered)), tuple(spans_of(missing)))
        yield rank, StoredLog(rank, sum(file.size for file in own.values()), coverage)


def _committed_at(files: _Files, committed: int) -> float | None:
    marker = files.checkpoints.get(f"{committed:08d}/committed.json")
    return marker.modified if marker is not None else None


def _machines(
    run: RunStore,
    journal: ArchivedJournal,
    state: State,
    logs: dict[int, StoredLog],
    iteration: int,
    *,
    ended: bool,
) -> Iterator[MachineStatus]:
    workers = run.topology["workers"]
    planner = LossPlanner(journal, run.profiles())
    trains = not ended and planner.live is not None
    for slot in range(run.topology["machines"]):
        name = state.membership.members.get(slot, "")
        loss = planner.plan([slot], iteration=iteration) if trains else None
        yield MachineStatus(
            machine=slot,
            name=name,
            address=state.membership.addresses.get(name, ""),
            logs=tuple(logs[rank] for rank in range(slot * workers, (slot + 1) * workers)),
            loss=loss,
            way=_way(loss) if loss is not None else "",
        )


def _way(loss: LossPlan) -> str:
    match loss.outcome:
        case Outcome.ENDS:
            return "none"
        case Outcome.RESTARTS:
            return "from the beginning"
    return _WAYS.get(RecoveryMode(loss.mode), loss.mode) if loss.mode else "waits"
