"""The bootstrap of a large job: each machine takes a ticket and publishes its address before slots exist.

Heads follow from slots, which no machine has yet. A machine with a ticket reads and writes the journal
through the one whose ticket `recovery/heads.py` names, as through a head. So joins are merged on their way,
and one machine reads them from the store, instead of each machine each join of all others.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError

from swift_ft.config import store_keys
from swift_ft.observe.waits import waiting
from swift_ft.recovery.heads import FANOUT, met_by
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_TOLD_S = 5.0
"""Deadline for a machine to publish its address after it took a ticket: it waits for nothing in between."""


class Met(NamedTuple):
    """A machine that was met.

    Attributes:
        machine: its name.
        address: where others reach its port.
    """

    machine: str
    address: str


class Meeting:
    """One machine's part.

    Args:
        store: a client of the rendezvous store.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.

    Attributes:
        ticket: of this machine, from 0.
    """

    def __init__(self, store: RendezvousStore, fanout: int = FANOUT) -> None:
        self._store = store
        self._fanout = fanout
        self.ticket = store.add(store_keys.meeting_tickets(), 1) - 1

    def meet(self, me: Met) -> Met | None:
        """Say where this machine is. Returns the one to go through; None: it goes to the store."""
        self._store.set(store_keys.met(self.ticket), " ".join(me))
        above = met_by(self.ticket, self._fanout)
        if above is None:
            return None
        key = store_keys.met(above)
        with waiting("a machine that has joined before this one to say where it is", _TOLD_S):
            try:
                self._store.wait([key], timedelta(seconds=_TOLD_S))
            except DistStoreError:
                _logger.debug("the machine with ticket %d is gone", above, extra={"event": "not_met"})
                return None
        machine, _, address = self._store.get(key).decode().partition(" ")
        return Met(machine, address)
