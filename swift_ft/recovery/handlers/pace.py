"""Handler of notes about devices that are persistently slower than others."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.devices import device_of
from swift_ft.recovery.job_state import State
from swift_ft.recovery.values import replace

_AS_OTHERS = 1000


def pace_noted(state: State, event: ev.PaceNoted) -> State:
    """Note how slow a worker's device is, or forget it. The layout that is best may be another one now."""
    membership, device = state.membership, device_of(state, event.rank)
    if membership.pace.get(device, _AS_OTHERS) == max(event.permille, _AS_OTHERS):
        return state
    if event.permille > _AS_OTHERS:
        pace = membership.pace.set(device, event.permille)
    else:
        pace = membership.pace.delete(device)
    return replace(state, membership=replace(membership, pace=pace))
