"""Requests of other layouts and other shares of a batch: a part of worker 0, and what it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.awaited_keys import AwaitedKeys
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.recovery import events as ev
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.elastic.layer_profiler import LayerCosts, layer_keys
from swift_ft.runtime.elastic.rebalance import Rebalance
from swift_ft.runtime.elastic.reshare import Reshare, ShareMicrobatches
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.worker.part import Part, StepInfo
from swift_ft.runtime.worker.ports import Job
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


class Requests(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        job: where requests are written.
        rank: the worker that asks.
        rebalance: says when layers should move; None where none can.
        reshare: says when replicas should get other shares of a batch; None where they have none.
        costs: of the layers of a LayerStack; None without one.
        keep_layers: takes them, once they are known, for later runs.
    """

    name = "requests"

    def __init__(
        self,
        job: Job,
        rank: int,
        rebalance: Rebalance | None,
        reshare: Reshare | ShareMicrobatches | None,
        costs: LayerCosts | None,
        keep_layers: Callable[[Sequence[LayerProfile]], None],
    ) -> None:
        self._job = job
        self._rank = rank
        self._rebalance = rebalance
        self._reshare = reshare
        self._unkept = costs
        self._keep_layers = keep_layers

    def boundary(self, step: StepInfo) -> None:
        state, rank, generation = self._job.state, self._rank, step.generation
        if self._unkept is not None and (layers := self._unkept.read(state)) is not None:
            self._keep_layers(layers)
            self._unkept = None
        # In the future, so that all workers learn of it before they are there (decision 15).
        stop = step.completed + ev.REQUESTED_AHEAD
        if self._reshare is not None and (shares := self._reshare.wanted(state, step.completed)):
            deal = ev.SharesRequested(rank=rank, generation=generation, iteration=stop, shares=shares)
            self._job.append(deal)  # nothing moves for it, so it comes first
        elif self._rebalance is not None and (layout := self._rebalance.wanted(state, step.completed)):
            request = ev.LayoutRequested(rank=rank, generation=generation, iteration=stop, layers=layout)
            self._job.append(request)


# The parts of one worker that move work away from slow ones: layer times, layouts, shares.
#
# Only worker 0 asks for other layouts and other shares. All measure.


def new_layer_costs(
    context: WorkerContext, layered: LoggedPipeline | None, rendezvous: RendezvousStore
) -> LayerCosts | None:
    """The measured costs of a LayerStack's layers, filled in later; None if there is no stack."""
    if layered is None or layered.stack is None:
        return None
    costs = LayerCosts(layered.stack.count)
    if context.rank == 0:
        AwaitedKeys(rendezvous, layer_keys(context.world_size), costs.take)
    return costs


def new_rebalance(
    context: WorkerContext, layered: LoggedPipeline | None, costs: LayerCosts | None
) -> Rebalance | None:
    """The object that asks for other layouts; None on ranks but 0, and where no layers can move."""
    if context.rank or costs is None or layered is None or layered.stack is None:
        return None
    return Rebalance(costs, by_pace=context.config.stragglers == "rebalance")


def new_reshare(
    context: WorkerContext,
    dealt: DealtBatches,
    costs: LayerCosts | None,
    pipeline: LoggedPipeline | None,
    *,
    sharded: bool,
) -> Reshare | ShareMicrobatches | None:
    """The object that asks for other shares of a batch; None on ranks but 0, and where all shares stay.

    Args:
        context: this worker's.
        dealt: the global batches, if the script has any.
        costs: of the layers of a LayerStack.
        pipeline: the worker's, if it has one.
        sharded: whether its parameters are.
    """
    by_pace = context.config.stragglers == "rebalance"
    if context.rank or not dealt:
        return None
    shared = pipeline.shared_layers if pipeline is not None else None
    if shared is not None and costs is not None:
        if why := shared.why_equal_shares:
            _logger.info(
                "All pipelines keep equally many microbatches: %s", why, extra={"event": "shares_stay"}
            )
            return None
        return ShareMicrobatches(dealt, costs, shared, by_pace=by_pace)
    return Reshare(dealt) if pipeline is None and not sharded and by_pace else None
