"""What computes for a worker: a machine, and the place on it. A guest shares its host's device. Pure."""

from __future__ import annotations

from collections import Counter

from swift_ft.recovery.job_state import State

__all__ = ["device_of", "devices_of_stages", "pace_of", "shared_devices"]

_AS_OTHERS = 1000


def device_of(state: State, rank: int) -> str:
    """The machine that a worker runs on, and which of its devices the worker has."""
    membership = state.membership
    machine = membership.members.get(state.slot_of_rank(rank), "")
    return f"{membership.hosts.get(machine, machine)}/{rank % state.shape.workers_per_machine}"


def pace_of(state: State, rank: int) -> int:
    """How long a worker's device takes, in thousandths of what others take."""
    return state.membership.pace.get(device_of(state, rank), _AS_OTHERS)


def devices_of_stages(state: State) -> tuple[str, ...]:
    """The device of each stage, in the pipeline's order."""
    found: dict[int, str] = {}
    for rank, status in state.round.statuses.items():
        found |= dict.fromkeys(status.stages, device_of(state, rank))
    return tuple(found[stage] for stage in sorted(found))


def shared_devices(state: State) -> frozenset[str]:
    """Devices that several workers share."""
    devices = Counter(device_of(state, rank) for rank in range(state.world_size))
    return frozenset(device for device, workers in devices.items() if workers > 1)
