"""The forecast of each machine's recovery, from what this job has measured."""

from __future__ import annotations

from dataclasses import replace

from swift_ft.planning.forecast import Forecast, forecast
from swift_ft.recovery.job_state import State
from swift_ft.runtime.attachments import Attachments
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.runtime.pipeline.script_partners import groups_of_script


def forecast_now(
    attached: Attachments,
    state: State,
    *,
    snapshot_every: int | None,
    costs: LayerCosts | None,
    dealt: DealtBatches | None,
) -> Forecast:
    """See :meth:`swift_ft.Session.plan`.

    Args:
        attached: the worker's pipeline or model, and its profiler.
        snapshot_every: iterations between two checkpoints in memory; None without any.
        costs: of the layers of a LayerStack.
        dealt: the global batches, from the first step on.
    """
    settings = attached.settings
    job = attached.profiler.job(
        groups=settings.recovery_groups,
        checkpoint_every=settings.checkpoint_every,
        snapshot_every=snapshot_every,
    )
    script = groups_of_script(attached.rendezvous, attached.context.world_size)
    job = replace(job, script=script, domains=state.domains)
    pipeline, shared = attached.layered, attached.shared_layers
    if pipeline is None or pipeline.stack is None:
        return forecast(job)
    stack = pipeline.stack
    layers = costs.read(state) if costs is not None else None
    alone = not state.membership.hosts
    return forecast(
        replace(
            job,
            layers=tuple(layers or ()),
            layout=state.layouts.current or stack.begun,
            schedule=pipeline.kind if alone else None,  # what is measured is each worker alone
            microbatches=pipeline.microbatches,
            counts=tuple(shared.counts) if shared is not None else (),
            shares_microbatches=shared is not None and bool(dealt) and not shared.why_equal_shares,
        )
    )
