"""The times of an iteration with other machines, as the policy asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.next_world import ORDINARY, Pipelines, of_layers, of_replicas
from swift_ft.recovery.devices import device_of, pace_of
from swift_ft.recovery.job_state import State


@dataclass(frozen=True, slots=True)
class Now:
    """An iteration of now, as it was measured.

    Attributes:
        iteration_ns: the whole of it.
        own_ns: of it, this worker's own work.
        machines: the most that there could be.
    """

    iteration_ns: int
    own_ns: int
    machines: int


Forecasts = Callable[[State, Now], dict[int, int]]
"""Times of an iteration in nanoseconds, by number of machines, each with a device of its own, none slow."""


class LayerForecasts:
    """Of a LayerStack, whose layers a next world deals evenly among its workers.

    Args:
        layers: returns what each costs; None as long as that is unknown.
        pipelines: their shape.
    """

    def __init__(
        self, layers: Callable[[State], Sequence[LayerProfile] | None], pipelines: Pipelines
    ) -> None:
        self._layers = layers
        self._pipelines = pipelines

    def __call__(self, state: State, now: Now) -> dict[int, int]:
        """See :data:`Forecasts`."""
        placed = state.layouts.placed
        if (layers := self._layers(state)) is None or len(placed) != state.world_size:
            return {}
        loads = loads_of(state)
        return of_layers(layers, self._pipelines, placed, loads, now_ns=now.iteration_ns, most=now.machines)


def replica_forecast(state: State, now: Now) -> dict[int, int]:
    """Of replicas among which global batches are dealt."""
    if any(load != ORDINARY for load in loads_of(state).values()):
        return no_forecast(state, now)  # a wait for a slow one is no part of the work
    machines = state.shape.machines
    return of_replicas(own_ns=now.own_ns, now_ns=now.iteration_ns, machines=machines, most=now.machines)


def no_forecast(state: State, now: Now) -> dict[int, int]:
    """Of a job that cannot train with other numbers of machines, or of which nobody knows how fast."""
    slowest = max([ORDINARY, *state.membership.pace.values()])
    return {state.shape.machines: now.iteration_ns * ORDINARY // slowest}


def loads_of(state: State) -> dict[int, int]:
    """By rank, how long its device takes for its work, in thousandths of an ordinary one's time."""
    ranks = range(state.world_size)
    devices = {rank: device_of(state, rank) for rank in ranks}
    workers = Counter(devices.values())
    return {rank: workers[devices[rank]] * max(ORDINARY, pace_of(state, rank)) for rank in ranks}
