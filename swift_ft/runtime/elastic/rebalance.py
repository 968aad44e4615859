"""Redistribution of layers: worker 0 asks for it once machines run more workers than one, or fewer again.

A machine that runs the workers of a lost one, too, gets fewer layers for each of them, by what each layer was
measured to cost. So does one that is slower than its peers, if the run asks for that. Once each machine runs
its own worker alone, and all are alike, the layers are where they were in the beginning. A change that has
just been made is not undone at once: the wait grows with each change, for machines that come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swift_ft.costs.shared_machines import Paces, worth_moving_to
from swift_ft.recovery.devices import AS_OTHERS, devices_of_stages
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import (
    StageLayers,
    begun_layout,
    cuts_of,
    stages_in,
)
from swift_ft.runtime.elastic.layer_profiler import LayerCosts

_PATIENCE = 64
"""Iterations after a change: the longest time in which no other one follows it."""
_TOO_LATE = 4
"""With fewer iterations to come, a change does not pay."""


class Rebalance:
    """Worker 0's look at the layout, after each iteration.

    Args:
        by_pace: whether slower machines get fewer layers.
    """

    def __init__(self, costs: LayerCosts, *, by_pace: bool = False) -> None:
        self._costs = costs
        self._by_pace = by_pace

    def wanted(self, state: State, iteration: int) -> StageLayers | None:
        """The layout to ask for after an iteration; None if the present one stays.

        Args:
            iteration: completed iterations.
        """
        if not may_change(state, iteration, state.layouts.since, state.layouts.changes):
            return None
        statuses, membership = state.round.statuses, state.membership
        stages, begun = stages_in(statuses), begun_layout(statuses)
        present = state.layouts.current or begun
        paces = membership.pace if self._by_pace else {}
        # With equal machines layers go back to the first layout, which needs no measurements.
        if not paces and not any(machine in membership.hosts for machine in membership.members.values()):
            return begun if present != begun else None
        if (layers := self._costs.read(state)) is None:
            return None
        devices = devices_of_stages(state)
        best: StageLayers = ()
        for own, cut in zip(cuts_of(devices, stages), cuts_of(present, stages), strict=True):
            best += worth_moving_to(layers, own, cut, _shared_with_others(own, devices, paces))
        return best if best != present and best not in state.layouts.declined else None


def _shared_with_others(own: Sequence[str], devices: Sequence[str], paces: Paces) -> Paces:
    """The paces of one pipeline's devices, which may compute stages of other pipelines, too."""
    of_pipeline, of_all = Counter(own), Counter(devices)
    found = {d: paces.get(d, AS_OTHERS) * of_all[d] // of_pipeline[d] for d in of_pipeline}
    return {device: pace for device, pace in found.items() if pace != AS_OTHERS}


def may_change(state: State, iteration: int, since: int, changes: int) -> bool:
    """Whether it is time for a change, of layers or of shares.

    Args:
        iteration: completed iterations.
        since: iterations that were completed at the last change.
        changes: how many there were.
    """
    plan = state.plan
    if state.phase != Phase.LIVE or plan is None or state.layouts.pending is not None:
        return False
    # A machine that leaves hands over to another one soon.
    if state.membership.draining or iteration <= plan.resume:
        return False
    # Each change doubles the wait for the next, so that noise does not move layers to and fro.
    if changes and iteration < since + min(1 << changes, _PATIENCE):
        return False
    steps = state.round.statuses[0].steps
    return steps is None or iteration + _TOO_LATE < steps
