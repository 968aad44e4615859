"""An audit of replicas: what they have contributed to the step after a checkpoint is computed again.

Replicas log no messages, so no interval can be replayed. But up to the average of the gradients a step is a
worker's own work: from a checkpoint, the script computes it without the others
(`runtime/offline_gradients.py`). What they have contributed is not needed, and nothing is rebuilt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from swift_ft.checkpoint.own_gradients import OwnGradients, read_own_gradients
from swift_ft.checkpoint.state_digest import StateDigests, differing, listed
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.config.audit import AuditRequest, AuditResult
from swift_ft.config.worker_context import OfflineReplay
from swift_ft.errors import SwiftError, UsageError, first_line
from swift_ft.offline.replay import check_setup, environment_of
from swift_ft.offline.replay_plan import ReplayPlan
from swift_ft.offline.replay_workers import ReplayWorkers
from swift_ft.offline.run_store import RunStore, open_run_store
from swift_ft.recovery.audit_orders import WHOLE_MODEL
from swift_ft.runtime.offline_gradients import noted_gradients
from swift_ft.storage.digest import digest_of_json
from swift_ft.units import named

_PATIENCE_S = 60.0
"""For workers to have written what they have contributed."""
_POLL_S = 0.2


def audit_gradients(request: AuditRequest) -> AuditResult:
    """Compute a machine's step again, and compare. Call it while the process has one thread: it forks."""
    out = Path(request.out)
    out.mkdir(parents=True)
    try:
        with ReplayWorkers() as workers:
            run = open_run_store(request.store)
            plan, recorded = _plan(run, request)
            check_setup(request.setup, request.kind, request.target)
            environment = environment_of(request.setup)
            offline = OfflineReplay(request.store, str(out), audit=True, gradients=True)
            script = (request.kind, request.target, request.args)
            workers.run(plan, run.run_id, offline, script, environment, lambda *_: None)
        computed = {rank: noted_gradients(out, rank) for rank in plan.ranks}
    except SwiftError as error:
        return AuditResult(problem=first_line(error))
    return _compared(request, recorded, computed)


def _plan(run: RunStore, request: AuditRequest) -> tuple[ReplayPlan, dict[int, StateDigests]]:
    """The workers that compute, and what they have contributed."""
    machines, each = run.topology["machines"], run.topology["workers"]
    ranks = range(request.machine * each, (request.machine + 1) * each)
    own = _own_gradients(run, request, machines * each, ranks)
    # All members of a group are given what one of them has noted, so the notes of all workers are needed.
    records = {
        rank: WorkerRecord((), WHOLE_MODEL, 0, 0, (), 0, {}, setup=own[rank].setup if rank in own else {})
        for rank in range(machines * each)
    }
    plan = ReplayPlan(
        machines, each, records, (request.machine,), request.begin, request.begin + 1, alone=True
    )
    return plan, {rank: own[rank].digests[request.begin] for rank in ranks}


def _own_gradients(
    run: RunStore, request: AuditRequest, world_size: int, ranks: range
) -> Mapping[int, OwnGradients]:
    """The notes of all workers, with the step that is audited: they write in the background."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        own = read_own_gradients(run.store, run.run_id, world_size)
        missing = [rank for rank in ranks if rank not in own or request.begin not in own[rank].digests]
        if not missing:
            return own
        if time.monotonic() > until:
            raise UsageError(
                f"{named('worker', missing)} noted no gradients of iteration {request.begin}: new since, "
                "or the store did not take them"
            )
        time.sleep(_POLL_S)


def _compared(
    request: AuditRequest, recorded: Mapping[int, StateDigests], computed: Mapping[int, StateDigests]
) -> AuditResult:
    """Worker by worker."""
    for rank, digests in recorded.items():
        if names := differing(computed[rank], digests):
            own = {name: computed[rank].get(name) for name in names}
            return AuditResult(
                rank=rank, iteration=request.begin, tensors=listed(names), digest=digest_of_json(own)
            )
    return AuditResult(slots=(request.machine,))
