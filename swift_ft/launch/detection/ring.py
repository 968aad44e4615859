"""The ring of all agents' addresses, and the neighbours in it that an agent watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import neighbours_of

_PAUSE_S = 0.001
"""Between two looks at a job that forms, for each machine in it."""


class Watch(NamedTuple):
    """The neighbours that a sentinel is to watch (:meth:`Sentinel.watch`)."""

    machines: Mapping[str, str]
    patience: int


class Ring:
    """Looks for neighbours when the addresses have changed.

    While a large job forms they change all the time, a look costs the size of the job, and each new neighbour
    is connected to. So looks are the rarer then the more machines there are. A machine that is lost meanwhile
    is found later, which costs no one time: the job waits for others.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: tuple[Mapping[str, str], int] | None = None
        self._look_at = 0.0

    def news(self, state: State, machine: str) -> Watch | None:
        """What a machine is to watch from now on; None if that has not changed, or it is too early."""
        addresses, patience = state.membership.addresses, state.machine_patience
        if self._seen is not None and addresses is self._seen[0] and patience == self._seen[1]:
            return None
        forms = state.phase == Phase.FORMING and not state.generation
        if forms and self._now() < self._look_at:
            return None
        self._seen = addresses, patience
        self._look_at = self._now() + _PAUSE_S * len(addresses)
        return Watch({name: addresses[name] for name in neighbours_of(machine, addresses)}, patience)
