"""When layers are shared anew: worker 0 asks for it, once machines run more workers than one, or fewer again.

A machine that runs the workers of a lost one, too, gets fewer layers for each of them, by what each layer was
measured to cost. Once each machine runs its own worker alone, the layers are as even as in the beginning. A
change that has just been made is not undone at once: the wait grows with each change, for machines that come
and go.
"""

from __future__ import annotations

from swift_ft.planning.layout.profile import LayerProfile
from swift_ft.planning.layout.shared_machines import worth_moving_to
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout, stages_in
from swift_ft.runtime.layer_profiler import read_layers
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["Rebalance", "devices_of_stages"]

_PATIENCE = 64
"""Iterations after a change: the longest time in which no other one follows it."""
_TOO_LATE = 4
"""With fewer iterations to come, a change does not pay."""


def devices_of_stages(state: State) -> tuple[str, ...]:
    """What computes each stage: the machine, and which of its workers' devices. A guest shares its host's."""
    membership = state.membership
    found: dict[int, str] = {}
    for rank, status in state.round.statuses.items():
        machine = membership.members.get(state.slot_of_rank(rank), "")
        device = rank % state.shape.workers_per_machine
        for stage in status.stages:
            found[stage] = f"{membership.hosts.get(machine, machine)}/{device}"
    return tuple(found[stage] for stage in sorted(found))


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
        statuses, membership = state.round.statuses, state.membership
        even = even_layout(self._count, stages_in(statuses))
        present = state.layouts.current or even
        if not any(machine in membership.hosts for machine in membership.members.values()):
            return even if present != even else None
        devices = devices_of_stages(state)
        if (layers := self._profile(len(statuses))) is None:
            return None
        best = worth_moving_to(layers, devices, present)
        return best if best != present and best not in state.layouts.declined else None

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
        if self._layers is None:
            self._layers = read_layers(self._rendezvous, workers, self._count)
        return self._layers
