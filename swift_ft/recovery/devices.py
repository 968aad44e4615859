"""The device of a worker: a machine and a place on it. A guest shares its host's device. Pure."""

from __future__ import annotations

from collections import Counter

from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import pipelines_in

AS_OTHERS = 1000
"""The pace of a device that is not slow."""


def device_of(state: State, rank: int) -> str:
    """The machine that a worker runs on, and which of its devices the worker has."""
    membership = state.membership
    machine = membership.members.get(state.slot_of_rank(rank), "")
    return f"{membership.hosts.get(machine, machine)}/{rank % state.shape.workers_per_machine}"


def pace_of(state: State, rank: int) -> int:
    """The pace of a worker's device, in thousandths of what others take."""
    return state.membership.pace.get(device_of(state, rank), AS_OTHERS)


def devices_of_stages(state: State) -> tuple[str, ...]:
    """The device of each stage, in the order of a layout: that of the pipelines, and of their stages."""
    statuses = state.round.statuses
    found: list[str] = []
    for ranks in pipelines_in(statuses):
        of_stage = {stage: rank for rank in ranks for stage in statuses[rank].stages}
        found += [device_of(state, of_stage[stage]) for stage in sorted(of_stage)]
    return tuple(found)


def shared_devices(state: State) -> frozenset[str]:
    """Devices that several workers share."""
    devices = Counter(device_of(state, rank) for rank in range(state.world_size))
    return frozenset(device for device, workers in devices.items() if workers > 1)
