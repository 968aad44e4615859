"""When layers are shared anew: worker 0 asks for it, once machines run more workers than one, or fewer again.

A machine that runs the workers of a lost one, too, gets fewer layers for each of them, by what each layer was
measured to cost. Once each machine runs its own worker alone, the layers are as even as in the beginning. A
change that has just been made is not undone at once: the wait grows with each change, for machines that come
and go.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from swift_ft.planning.layout.layer_balance import Stage, balance
from swift_ft.planning.layout.profile import LayerProfile
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout, layers_of, stages_in
from swift_ft.runtime.layer_profiler import LAYERS_KEY
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.waits import waiting

__all__ = ["Rebalance", "balanced", "machines_of_stages"]

_WORTH = 0.95
"""A change has to bring the slowest machine down to this share of its time at least."""
_PATIENCE = 64
"""Iterations after a change: the longest time in which no other one follows it."""
_TOO_LATE = 4
"""With fewer iterations to come, a change does not pay."""
_ANY_BYTES = 1 << 60


def machines_of_stages(state: State) -> tuple[str, ...]:
    """The machine that computes each stage: for a guest's stages that is its host."""
    membership = state.membership
    found: dict[int, str] = {}
    for rank, status in state.round.statuses.items():
        machine = membership.members.get(state.slot_of_rank(rank), "")
        for stage in status.stages:
            found[stage] = membership.hosts.get(machine, machine)
    return tuple(found[stage] for stage in sorted(found))


def balanced(layers: Sequence[LayerProfile], machines: Sequence[str]) -> StageLayers:
    """The layout in which the slowest machine is fastest, if machines divide their time among their stages.

    Args:
        layers: of the whole model.
        machines: of each stage.
    """
    stages_of = Counter(machines)
    reference = 1
    for count in stages_of.values():
        reference *= count
    stages = [Stage(reference // stages_of[machine], _ANY_BYTES) for machine in machines]
    found = balance(layers, stages, reference=reference, microbatches=1)
    assert found is not None  # there is a layer for each stage
    return tuple(last - first + 1 for first, last in found.stages)


def slowest_ns(layers: Sequence[LayerProfile], machines: Sequence[str], layout: StageLayers) -> int:
    """The time that the slowest machine computes for one microbatch."""
    load: Counter[str] = Counter()
    for stage, machine in enumerate(machines):
        load[machine] += sum(layers[number].compute_ns for number in layers_of(layout, stage))
    return max(load.values())


class Rebalance:
    """Worker 0's look at the layout, after each iteration.

    Args:
        rendezvous: has what all workers have measured of their layers.
        count: layers of the model.
    """

    def __init__(self, rendezvous: RendezvousStore, count: int) -> None:
        self._rendezvous = rendezvous
        self._count = count
        self._layers: list[LayerProfile] | None = None

    def wanted(self, state: State, iteration: int) -> StageLayers | None:
        """The layout to ask for after an iteration; None if the present one stays.

        Args:
            state: of the job.
            iteration: completed iterations.
        """
        if not self._may_change(state, iteration):
            return None
        statuses, machines = state.round.statuses, machines_of_stages(state)
        even = even_layout(self._count, stages_in(statuses))
        present = state.layouts.current or even
        if len({*machines}) == len(machines):
            return even if present != even else None
        if (layers := self._profile(len(statuses))) is None:
            return None
        best = balanced(layers, machines)
        gain = slowest_ns(layers, machines, best) <= _WORTH * slowest_ns(layers, machines, present)
        return best if gain and best not in state.layouts.declined else None

    def _may_change(self, state: State, iteration: int) -> bool:
        layouts, plan = state.layouts, state.plan
        if state.phase != Phase.LIVE or plan is None or layouts.pending is not None:
            return False
        if state.membership.draining or iteration <= plan.resume:
            return False
        if layouts.changes and iteration < layouts.since + min(1 << layouts.changes, _PATIENCE):
            return False
        steps = state.round.statuses[0].steps
        return steps is None or iteration + _TOO_LATE < steps

    def _profile(self, workers: int) -> list[LayerProfile] | None:
        """What each layer costs, once all workers have measured theirs."""
        keys = [LAYERS_KEY.format(rank) for rank in range(workers)]
        if self._layers is None and self._rendezvous.check(keys):
            found: dict[int, LayerProfile] = {}
            with waiting("the rendezvous store to say what each layer costs"):
                published = [self._rendezvous.get(key) for key in keys]
            for text in published:
                stages: Mapping[str, list[dict[str, object]]] = json.loads(text)
                for layers in stages.values():
                    found |= {int(str(layer["name"])): LayerProfile(**layer) for layer in layers}  # type: ignore[arg-type]  # from JSON
            if len(found) == self._count:
                self._layers = [found[number] for number in range(self._count)]
        return self._layers
