"""Rebuilds the state of a lost machine from its checkpoint and the logs of others, without its job.

The workers of the machine run the user's script on this host, as replacements do in a live recovery: they
follow a journal, which here tells of a job whose other workers wait at the iteration that is asked for. The
store of the run is opened to be read only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import digest_of_manifest
from swift_ft.checkpoint.worker_record import WorkerRecord, read_record
from swift_ft.config.run_config import RunConfig
from swift_ft.config.worker_context import OfflineReplay
from swift_ft.errors import DamagedCheckpointError, UsageError
from swift_ft.launch.rendezvous.setup import environment_facts, is_readable_file, setup_of
from swift_ft.offline.archive import ArchivedJournal, read_journal
from swift_ft.offline.checkpoint_check import part_damages
from swift_ft.offline.part_comparison import REPLAY_RECORD, differences, find_parts, iteration_of, read_part
from swift_ft.offline.replay_plan import ReplayPlan, log_extent, machines_to_replay
from swift_ft.offline.replay_workers import ReplayWorkers, log_name
from swift_ft.offline.run_store import RunStore, open_run_store
from swift_ft.recovery.events import JobOpened
from swift_ft.recovery.job_state import SavedPart
from swift_ft.runtime.offline_replay import part_name
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.units import named

_LOG_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ToldRun:
    """The facts about a run that lives, by one who follows its journal.

    Attributes:
        setup: what all machines have in common.
        since: the generation before which all segments of the log belong to an abandoned history.
        moved: completed iterations with which the present layout began.
        start_values: what the scripts of workers had set at first, as the rendezvous store has it.
    """

    setup: tuple[str, ...]
    since: int
    moved: int
    start_values: Mapping[str, str] = field(default_factory=dict)

    def log_since(self, begin: int) -> int:
        """See :meth:`_ArchivedRun.log_since`."""
        return self.since


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The request for a replay.

    Attributes:
        store: URL of the run's store.
        machine: the slot whose workers are rebuilt.
        out: the folder for their states. It must be empty or absent.
        kind: of the script: ``script``, or ``module`` (``-m``).
        target: its path, or the module's name.
        args: its arguments.
        until: completed iterations of the rebuilt state; None for as many as the log allows.
        checkpoint: the iteration of the checkpoint to begin with; None for the newest intact one that is not
            after ``until``.
        check_against: URL of saved states to compare with; None for none.
        told: facts about the run; None to read them from its archived journal.
        patience_s: how long to wait for a log that ends before ``until``: its job lives.
        audit: what differs from what the original sent is noted in ``out``.
        limit_s: how long it may take until the next iteration is complete; None for as long as it takes.
    """

    store: str
    machine: int
    out: Path
    kind: str
    target: str
    args: tuple[str, ...] = ()
    until: int | None = None
    checkpoint: int | None = None
    check_against: str | None = None
    told: ToldRun | None = None
    patience_s: float = 0.0
    audit: bool = False
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class OfflineReplayResult:
    """The result of a replay.

    Attributes:
        run_id: the run.
        machines: the slots whose workers were rebuilt: the one that was asked for, and those without which it
            cannot be.
        checkpoint: the iteration of the checkpoint that they began with.
        iteration: iterations that the rebuilt states have completed.
        parts: the folder of each worker's state, by rank.
        setup_known: the journal in the store says with which script the run was started: it was this one.
        compared: ranks whose states were compared with saved ones.
        differences: by rank, the names of tensors and values that differ.
    """

    run_id: str
    machines: tuple[int, ...]
    checkpoint: int
    iteration: int
    parts: Mapping[int, str]
    setup_known: bool = True
    compared: tuple[int, ...] = ()
    differences: Mapping[int, Sequence[str]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def replay_machine(
    request: ReplayRequest, on_iteration: Callable[[ReplayPlan, int, int], None] = lambda *_: None
) -> OfflineReplayResult:
    """Rebuild the workers of a machine. Call it while the process has a single thread: it forks.

    Args:
        request: what is asked for.
        on_iteration: called with the plan, a rank, and the iterations that its state has completed.

    Raises:
        UsageError: the user can fix it.
        CheckpointError: the checkpoint is damaged.
        RecoveryError: the log is damaged, or the script failed.
    """
    _check_folder(request.out)
    if request.kind == "script" and not is_readable_file(request.target):
        raise UsageError(f"there is no script {request.target!r}: give the one that the run was started with")
    with ReplayWorkers() as workers:
        run = open_run_store(request.store)
        against = find_parts(request.check_against) if request.check_against is not None else None
        facts = request.told or _ArchivedRun(read_journal(run.store, run.run_id))
        setup = facts.setup
        plan = _plan(run, request, facts)
        _check_iteration(request, plan)
        check_setup(setup, request.kind, request.target)
        environment = environment_of(setup)
        with _filled(request.out, plan.ranks):
            out = str(request.out.absolute())
            offline = OfflineReplay(request.store, out, plan.log_since, request.audit)
            script = (request.kind, request.target, request.args)
            told = partial(on_iteration, plan)
            workers.run(plan, run.run_id, offline, script, environment, told, limit_s=request.limit_s)
            _write_record(request.out, run, plan)
    result = OfflineReplayResult(
        run.run_id,
        plan.lost,
        plan.begin,
        plan.until,
        {rank: str(request.out / part_name(rank)) for rank in plan.ranks},
        setup_known=bool(setup),
    )
    return result if against is None else _compared(result, request, plan, against)


# ------------------------------------------------------------------------------------------ what to replay


class _ArchivedRun:
    """The facts about a run by its archived journal."""

    def __init__(self, journal: ArchivedJournal) -> None:
        self._journal = journal
        state = journal.last_state()
        self.setup = state.shape.setup
        self.moved = state.layouts.since
        self.start_values: Mapping[str, str] = {}

    def log_since(self, begin: int) -> int:
        """The generation before which all segments of the log belong to an abandoned history.

        Args:
            begin: completed iterations of the checkpoint with which a replay begins.
        """
        return _log_since(self._journal, begin)


def _plan(run: RunStore, request: ReplayRequest, facts: ToldRun | _ArchivedRun) -> ReplayPlan:
    machines, workers = run.topology["machines"], run.topology["workers"]
    if not 0 <= request.machine < machines:
        raise UsageError(f"--machine {request.machine}: the run has the machines 0 to {machines - 1}")
    records = _records(run, machines * workers, request.machine)
    lost = machines_to_replay(records, request.machine, workers)
    ranks = [rank for rank in records if rank // workers in lost]
    begin = _checkpoint(run, request, ranks)
    _check_layers(facts.moved, begin)
    since = facts.log_since(begin)
    until_s = time.monotonic() + request.patience_s
    extent = log_extent(run.store, run.run_id, records, ranks, begin, since=since)
    until = extent if request.until is None else request.until
    while extent is not None and until is not None and extent < until and time.monotonic() < until_s:
        time.sleep(_LOG_POLL_S)
        extent = log_extent(run.store, run.run_id, records, ranks, begin, since=since)
    if until is None:
        raise UsageError("this replay needs no log: say with --to-iteration where it ends")
    if extent is not None and until > extent:
        if request.audit:
            raise UsageError(f"its log ends with iteration {extent}, and the next checkpoint is of {until}")
        begins = f"begins with the checkpoint of iteration {begin} and " if extent == begin else ""
        raise UsageError(
            f"--to-iteration {until}: the replay {begins}can go to iteration {extent}, where the log ends. "
            f"Give at most {extent}"
        )
    layout = run.checkpoints.layout_of(begin)
    return ReplayPlan(
        machines, workers, records, lost, begin, until, since, layout, start_values=facts.start_values
    )


def _check_iteration(request: ReplayRequest, plan: ReplayPlan) -> None:
    """States of two iterations differ in nearly everything, which would say nothing."""
    if request.check_against is None:
        return
    iteration = iteration_of(request.check_against)
    if iteration is not None and iteration != plan.until:
        raise UsageError(
            f"--check-against {request.check_against} is of iteration {iteration}, and this replay goes to "
            f"iteration {plan.until}: name another one, or give --to-iteration {iteration}"
        )


def _records(run: RunStore, world_size: int, machine: int) -> dict[int, WorkerRecord]:
    records = {rank: read_record(run.store, rank) for rank in range(world_size)}
    found = {rank: record for rank, record in records.items() if record is not None}
    if len(found) == world_size:
        return found
    if run.topology["stages"] == 1 and not found:
        newest = max(run.checkpoints.committed(), default=None)
        saved = f"or that of the checkpoint of iteration {newest}" if newest is not None else "or lost"
        raise UsageError(
            f"machine {machine} is a data-parallel replica, and replicas log no messages: its state is that "
            f"of any live replica, {saved}"
        )
    missing = named("worker", sorted(set(range(world_size)) - set(found)))
    raise UsageError(
        f"{run.store.url} does not say which stages {missing} had: the run ended before its first step"
    )


def _checkpoint(run: RunStore, request: ReplayRequest, ranks: Sequence[int]) -> int:
    """The checkpoint to begin with."""
    folder, kept = run.checkpoints, run.checkpoints.committed()
    if not kept:
        raise UsageError(f"{run.store.url} has no committed checkpoint: there is nothing to begin with")
    shown = f"{run.store.url} has the checkpoints of iteration {', '.join(map(str, kept))}"
    if request.checkpoint is not None:
        if request.checkpoint not in kept:
            if request.audit:
                raise UsageError(f"the checkpoint of iteration {request.checkpoint} is gone: {shown}")
            raise UsageError(f"--from-checkpoint {request.checkpoint}: {shown}")
        if request.until is not None and request.until < request.checkpoint:
            raise UsageError(
                f"--to-iteration {request.until} is before --from-checkpoint {request.checkpoint}"
            )
        if damages := _damages(folder, request.checkpoint, ranks):
            remedy = "" if request.audit else ". Choose another one"
            raise DamagedCheckpointError(
                f"the checkpoint of iteration {request.checkpoint} is damaged: {damages[0]}{remedy}"
            )
        return request.checkpoint
    possible = [i for i in kept if request.until is None or i <= request.until]
    if not possible:
        raise UsageError(f"--to-iteration {request.until} is before the oldest checkpoint: {shown}")
    first: list[str] = []
    for iteration in reversed(possible):
        damages = _damages(folder, iteration, ranks)
        if not damages:
            return iteration
        first = first or damages
    raise DamagedCheckpointError(f"no checkpoint is intact: {first[0]}")


def _log_since(journal: ArchivedJournal, begin: int) -> int:
    """The generation before which all segments of the log belong to an abandoned history."""
    before, later = journal.last_state(), journal.after_gaps()
    since = before.checkpoints.log_since if later is None else later.log_since(before, begin)
    if since is None:
        possible = (
            sorted(i for i in later.saved_in if later.log_since(before, i) is not None) if later else []
        )
        remedy = (
            f"Begin with --from-checkpoint {', '.join(map(str, possible))}"
            if possible
            else "No replay is safe without these entries"
        )
        raise UsageError(
            f"{journal.gaps[0]}. All workers may have gone back to a checkpoint in that time, so nothing "
            f"shows which logs belong to this history. {remedy}"
        )
    return since


def _check_layers(moved: int, begin: int) -> None:
    """The log is of one layout: that of the newest change."""
    if begin < moved:
        raise UsageError(
            f"layers have moved between the stages after iteration {moved - 1}, and the checkpoint of "
            f"iteration {begin} is before that: choose one of iteration {moved} or later (--from-checkpoint)"
        )


def _damages(folder: CheckpointFolder, iteration: int, ranks: Sequence[int]) -> list[str]:
    """The damages in the parts of some workers, one line each."""
    try:
        parts = folder.parts_of(iteration)
    except DamagedCheckpointError as error:
        return [str(error)]
    needed = dict.fromkeys(parts[rank] for rank in ranks)  # replicas share one
    return [
        f"{line} ({folder.store.url}/{part.path})" for part in needed for line in part_damages(folder, part)
    ]


_VARIABLE = "the variable "
_SET_BY_SWIFT_RUN = {"OMP_NUM_THREADS": "1"}
"""For a host on which it starts several workers."""


def check_setup(setup: tuple[str, ...], kind: str, target: str) -> None:
    """The script and what runs it must be those of the run: others may compute other bits.

    Args:
        setup: the facts of the run.
        kind: of the script, as the next one is that of :class:`ReplayRequest`.
        target: see there.

    Raises:
        UsageError: they are others.
    """
    here = setup_of(JobOpened(machines=1), RunConfig(), kind, target)
    ours, theirs = (dict(fact.split(": ", 1) for fact in facts) for facts in (here, setup))
    for name in ("swift_ft", "torch", "Python", "the script", "the module"):
        if name in theirs and ours.get(name) != theirs[name]:
            raise UsageError(
                f"{name} is {ours.get(name, 'unknown')} here and was {theirs[name]} in the run: the rebuilt "
                "state would be another one. Use what the run was started with"
            )


def environment_of(setup: tuple[str, ...]) -> dict[str, str]:
    """The variables to set for the script, as swift-run has done where they were not set.

    Args:
        setup: the facts of the run; without any it is unknown whether this is its environment.

    Raises:
        UsageError: one that the script reads, or that changes numbers, is not that of the run.
    """
    facts = dict(fact.split(": ", 1) for fact in setup)
    theirs = {name: value for name, value in facts.items() if name.startswith(_VARIABLE)}
    to_set = {
        name: value
        for name, value in _SET_BY_SWIFT_RUN.items()
        if name not in os.environ and (not theirs or f"{_VARIABLE}{name}" in theirs)
    }
    if not theirs:
        return to_set
    read = [name.removeprefix(_VARIABLE) for name in theirs]
    ours = environment_facts(read, env={**to_set, **os.environ})
    for name in sorted({*ours, *theirs}):
        here, there = ours.get(name, "not set"), theirs.get(name, "not set")
        if here != there:
            raise UsageError(
                f"{name} is {here} here and was {there} in the run: the rebuilt state would be another one. "
                "Set it as in the run"
            )
    return to_set


# ------------------------------------------------------------------------------------------ the folder


def _check_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is not an empty folder: choose another one, or empty it")


@contextlib.contextmanager
def _filled(out: Path, ranks: Sequence[int]) -> Iterator[None]:
    """The folder is left as it was found if the block fails, but for the output of a script that failed."""
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made ({error.strerror}): choose another folder") from error
    try:
        yield
    except BaseException as error:
        for rank in ranks:
            shutil.rmtree(out / part_name(rank), ignore_errors=True)
            if isinstance(error, UsageError):
                (out / log_name(rank)).unlink(missing_ok=True)
        if not existed and not any(out.iterdir()):
            out.rmdir()
        raise


def _write_record(out: Path, run: RunStore, plan: ReplayPlan) -> None:
    """Say what the folder holds, last of all."""
    folder = Store(out)
    facts = {
        "run_id": run.run_id,
        "iteration": plan.until,
        "checkpoint": plan.begin,
        "parts": {str(rank): part_name(rank) for rank in plan.ranks},
        "digests": {name: digest_of_manifest(folder, name) for name in map(part_name, plan.ranks)},
    }
    folder.write_json(REPLAY_RECORD, sealed(facts))


def _compared(
    result: OfflineReplayResult,
    request: ReplayRequest,
    plan: ReplayPlan,
    against: Mapping[int | None, tuple[Store, SavedPart]],
) -> OfflineReplayResult:
    own = [rank for rank in plan.ranks if rank // plan.workers_per_machine == request.machine]
    pairs = {rank: against[rank] for rank in plan.ranks if rank in against}
    if None in against and len(own) == 1:
        pairs = {own[0]: against[None]}
    if not pairs:
        raise UsageError(
            f"--check-against {request.check_against} holds no state of {named('worker', own)}: give a whole "
            "checkpoint (the replay itself is complete)"
        )
    out = Store(request.out)
    found = {}
    for rank, (store, part) in pairs.items():
        own_state, saved = read_part(out, SavedPart(part_name(rank), "")), read_part(store, part)
        of_replica = not part.path.rsplit("/", 1)[-1].startswith(part_name(rank))
        found[rank] = differences(own_state, saved, of_replica=of_replica)
    different = {rank: names for rank, names in found.items() if names}
    return replace(result, compared=tuple(found), differences=different)
