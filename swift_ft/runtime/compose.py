"""Chooses a worker's runtime: that of a job, of a check, or of a replay without a job."""

from __future__ import annotations

import os

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.runtime.assembly import Assembly
from swift_ft.runtime.checked_run import CheckedAssembly
from swift_ft.runtime.offline_gradients import GradientsAssembly
from swift_ft.runtime.offline_replay import OfflineAssembly
from swift_ft.runtime.settings import Settings
from swift_ft.storage.read_only import ReadOnlyStore
from swift_ft.storage.store import PATIENCE_S, Store


def assemble(
    context: WorkerContext, url: str | os.PathLike[str], state: TrainingState, settings: Settings
) -> Assembly:
    """Build a worker's runtime.

    Args:
        context: the worker's place.
        url: the store that the script names.
        state: what is protected.
        settings: the session's.

    Raises:
        StoreNotWritableError: the store cannot be written.
    """
    if context.check:
        return CheckedAssembly(context, url, state, settings)
    if context.offline is None:
        # In a recovery the others would take a worker that still tries for one that does not answer.
        within_s = min(context.config.within_report_s, context.config.within_replay_s)
        return Assembly(context, Store(url, patience_s=min(PATIENCE_S, within_s)), state, settings)
    kind = GradientsAssembly if context.offline.gradients else OfflineAssembly
    return kind(context, ReadOnlyStore(context.offline.store), state, settings)
