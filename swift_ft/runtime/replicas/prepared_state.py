"""Packs what a worker sends to its replicas before they wait for it, while a new group is formed."""

from __future__ import annotations

import contextlib

from swift_ft.errors import UnsupportedError
from swift_ft.recovery.plan import Plan
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker_status import WorkerStatus

__all__ = ["PreparedState"]


class PreparedState:
    """The whole state of one worker, as it is sent first of all.

    Args:
        rank: this worker.
        replicas: holds the state, and what was packed.
    """

    def __init__(self, rank: int, status: WorkerStatus, replicas: Replicas) -> None:
        self._rank = rank
        self._status = status
        self._replicas = replicas

    def forget(self) -> None:
        """The state may be another one now."""
        self._replicas.prepare_state(whole=False)

    def prepare_early(self) -> None:
        """Have ready what this worker may have to send, while it waits for others."""
        status = self._status
        if self._replicas.attached and status.known and status.dirty is None and not status.updated:
            with contextlib.suppress(UnsupportedError):  # raised again where the state has to be sent
                self._replicas.prepare_state(whole=True)

    def prepare(self, plan: Plan, *, unchanged: bool) -> None:
        """Have ready what this worker sends, unless it receives first. Before the group is formed.

        Args:
            plan: says who sends what. Layers are packed as they are sent.
            unchanged: the state is that of :meth:`prepare_early`, if that was called since :meth:`forget`.
        """
        own = [t for t in plan.transfers if self._rank == t.source or self._rank in t.targets]
        whole = bool(own) and own[0].source == self._rank and own[0].parameters is None and not own[0].layers
        self._replicas.prepare_state(whole=whole, unchanged=unchanged)
