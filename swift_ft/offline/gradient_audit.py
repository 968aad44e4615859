"""An audit of replicas: what they have contributed to the step after a checkpoint is computed again.

Replicas log no messages, so no interval can be replayed. But up to the average of the gradients a step is a
worker's own work: from a checkpoint, the script computes it without the others
(`runtime/offline_gradients.py`). What they have contributed is not needed, and nothing is rebuilt.

A difference counts only where both have begun alike. A replica may have begun with another state than the
checkpoint's: an undo rounds, and variables of the script may be each replica's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from swift_ft.checkpoint.own_gradients import OwnStep, read_own_steps
from swift_ft.checkpoint.state_digest import differing, listed
from swift_ft.checkpoint.worker_files import SETUP, WorkerFiles, of_rank
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.config.audit import AuditRequest, AuditResult
from swift_ft.config.worker_context import OfflineReplay
from swift_ft.errors import SwiftError, UsageError, first_line
from swift_ft.host.processor import why_other_bits
from swift_ft.observe.waits import waiting
from swift_ft.offline.replay import check_setup, environment_of
from swift_ft.offline.replay_plan import ReplayPlan
from swift_ft.offline.replay_workers import ReplayWorkers
from swift_ft.offline.run_store import RunStore, open_run_store
from swift_ft.recovery.topology import WHOLE_MODEL
from swift_ft.runtime.offline_gradients import noted_step
from swift_ft.storage.digest import digest_of_json

_PATIENCE_S = 60.0
"""For workers to have written what they have contributed."""
_POLL_S = 0.5
_VARIABLE = "the variable "
_UNKNOWN = -1
"""The digest of a variable that cannot be saved, and so is none of a replacement's."""


def audit_gradients(request: AuditRequest) -> AuditResult:
    """Compute a machine's step again, and compare. Call it while the process has one thread: it forks."""
    out = Path(request.out)
    out.mkdir(parents=True)
    first = request.machine * request.workers
    ranks = range(first, first + request.workers)
    try:
        with ReplayWorkers() as workers:
            run = open_run_store(request.store)
            recorded = _recorded(run, request, ranks)
            check_setup(request.setup, request.kind, request.target)
            # The script's process ends in the middle, and leaves its temporary files.
            environment = {**environment_of(request.setup), "TMPDIR": str(out)}
            offline = OfflineReplay(request.store, str(out), gradients=True)
            script = (request.kind, request.target, request.args)
            plan = _plan(run, request)
            workers.run(
                plan, run.run_id, offline, script, environment, lambda *_: None, limit_s=request.limit_s
            )
        computed = {rank: noted_step(out, rank) for rank in ranks}
    except SwiftError as error:
        return AuditResult(problem=first_line(error))
    return compared(request, recorded, computed)


def _plan(run: RunStore, request: AuditRequest) -> ReplayPlan:
    """Only this machine's workers compute. Each is given what all have noted before the first step."""
    records, files = {}, WorkerFiles(run.store, run.run_id)
    for rank in range(request.machines * request.workers):
        if (setup := files.find(of_rank(rank, SETUP))) is None:
            raise UsageError(f"worker {rank} has not noted what its script communicated at first")
        records[rank] = WorkerRecord(
            stages=(),
            holds=WHOLE_MODEL,
            pipeline=0,
            group=0,
            linked=(),
            microbatches=0,
            shapes={},
            setup=setup,
        )
    return ReplayPlan(
        machines=request.machines,
        workers_per_machine=request.workers,
        records=records,
        lost=(request.machine,),
        begin=request.begin,
        until=request.begin + 1,
        start_values=request.start_values,
        alone=True,
    )


def _recorded(run: RunStore, request: AuditRequest, ranks: Iterable[int]) -> dict[int, OwnStep]:
    """The notes of the step that is audited. Workers write them in the background."""
    found, files = dict[int, OwnStep](), WorkerFiles(run.store, run.run_id)
    until = time.monotonic() + _PATIENCE_S
    with waiting("workers to note what they have contributed", _PATIENCE_S):
        while missing := [rank for rank in ranks if rank not in found]:
            for rank in missing:
                steps = read_own_steps(files, rank)
                step = steps.get(request.begin)
                if step is not None and step.epoch == request.epoch:
                    found[rank] = step
                elif time.monotonic() > until or max(steps, default=0) > request.begin:
                    raise UsageError(
                        f"worker {rank} has noted no gradients of iteration {request.begin}: it is new, or "
                        "that step had another shape"
                    )
            if len(found) < len(missing):
                time.sleep(_POLL_S)
    return found


def compared(
    request: AuditRequest, recorded: Mapping[int, OwnStep], computed: Mapping[int, OwnStep]
) -> AuditResult:
    """The result for a machine. A difference on one of its workers counts unless its step began unlike."""
    problem = ""
    for rank, theirs in recorded.items():
        ours = computed[rank]
        if not (names := differing(ours.gradients, theirs.gradients)):
            continue
        if why := _why_no_finding(ours, theirs):
            problem = problem or f"worker {rank} has other gradients in iteration {request.begin}: {why}"
            continue
        own = {name: ours.gradients.get(name) for name in names}
        digest = digest_of_json(own)
        return AuditResult(rank=rank, iteration=request.begin, tensors=listed(names), digest=digest)
    return AuditResult(problem=problem) if problem else AuditResult(slots=(request.machine,))


def _why_no_finding(ours: OwnStep, theirs: OwnStep) -> str:
    """Why another result is nobody's fault; empty if all that it follows from was the same."""
    if why := why_other_bits(ours.host, theirs.host):
        return why
    # Of variables, those that are as at the start are not in the notes, but the spare names all.
    at_start = {name: 0 for name in ours.begin if name.startswith(_VARIABLE)}
    before = {**at_start, **theirs.begin}
    unlike = differing(ours.begin, before)
    unlike += [name for name, digest in theirs.begin.items() if digest == _UNKNOWN and name not in unlike]
    return f"it has begun with something else than the spare ({listed(unlike)})" if unlike else ""
