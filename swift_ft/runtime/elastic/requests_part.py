"""Asks for other layouts and other shares of a batch, where that is due: a part of worker 0."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.runtime.elastic.rebalance import Rebalance
from swift_ft.runtime.elastic.reshare import Reshare, ShareMicrobatches
from swift_ft.runtime.worker.part import Part, StepInfo
from swift_ft.runtime.worker.ports import Job


class Requests(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        job: where requests are written.
        rank: the worker that asks.
        rebalance: says when layers should move; None where none can.
        reshare: says when replicas should get other shares of a batch; None where they have none.
    """

    name = "requests"

    def __init__(
        self, job: Job, rank: int, rebalance: Rebalance | None, reshare: Reshare | ShareMicrobatches | None
    ) -> None:
        self._job = job
        self._rank = rank
        self._rebalance = rebalance
        self._reshare = reshare

    def boundary(self, step: StepInfo) -> None:
        state, rank, generation = self._job.state, self._rank, step.generation
        stop = step.completed + ev.REQUESTED_AHEAD
        if self._reshare is not None and (shares := self._reshare.wanted(state, step.completed)):
            deal = ev.SharesRequested(rank=rank, generation=generation, iteration=stop, shares=shares)
            self._job.append(deal)  # nothing moves for it, so it comes first
        elif self._rebalance is not None and (layout := self._rebalance.wanted(state, step.completed)):
            request = ev.LayoutRequested(rank=rank, generation=generation, iteration=stop, layers=layout)
            self._job.append(request)
