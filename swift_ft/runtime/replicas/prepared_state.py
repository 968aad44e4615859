"""Packs what a worker sends to its replicas before they wait for it, while a new group is formed."""

from __future__ import annotations

import contextlib

from swift_ft.errors import UnsupportedError
from swift_ft.observe.spans import recorder
from swift_ft.recovery.job_state import State
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.part import Part, Round
from swift_ft.runtime.worker.status import WorkerStatus


class PreparedState(Part):
    """The whole state of one worker, as it is sent first of all.

    Args:
        status: knows whether the state is whole.
        replicas: holds the state, and what was packed.
        only_replicas: the worker has neither a pipeline nor batches that are dealt: nothing changes its state
            between its report and the new group.
    """

    name = "sending"

    def __init__(self, status: WorkerStatus, replicas: Replicas, *, only_replicas: bool) -> None:
        self._status = status
        self._replicas = replicas
        self._only_replicas = only_replicas

    def settle(self, state: State) -> None:
        """Forget what was packed."""
        self._replicas.prepare_state(whole=False)  # the state may be another one now

    def idle(self) -> None:
        """Have ready what this worker may have to send."""
        status = self._status
        whole = status.known and status.dirty is None and not status.updated
        if self._only_replicas and self._replicas.attached and whole:
            with (
                recorder.span("prepare to send"),
                contextlib.suppress(UnsupportedError),  # raised again where the state has to be sent
            ):
                self._replicas.prepare_state(whole=True)

    def prepare(self, round: Round) -> None:
        """Have ready what this worker sends, unless it receives first. Layers are packed as they are sent."""
        plan, task = round.plan, round.task
        own = [t for t in plan.transfers if round.rank == t.source or round.rank in t.targets]
        first = own[0] if own else None
        whole = (
            first is not None and first.source == round.rank and first.parameters is None and not first.layers
        )
        kept = task.load is None and not (task.undo or task.back) and plan.parts_from is None
        with recorder.span("prepare to send"):
            self._replicas.prepare_state(whole=whole, unchanged=kept and self._only_replicas)
