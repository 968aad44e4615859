"""Signs of life of a run: a key in the rendezvous store changes as long as any of its machines lives.

A store of its own outlives all machines of a run. Its journal still names them then, and nobody is left to
write there that they are gone.
"""

from __future__ import annotations

import time
import uuid

from swift_ft.config import detection_timings as timings
from swift_ft.config import store_keys
from swift_ft.observe.waits import waiting
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


class LifeSigns:
    """Those of one machine. In a large job a few machines give all of them.

    Args:
        store: a client of the rendezvous store.
    """

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        self._seen = ""

    def give(self) -> None:
        """Change the key, unless another machine has since the last call. Call it every ``SIGN_S``."""
        key, new = store_keys.sign_of_life(), uuid.uuid4().hex[:12]
        self._seen = self._store.compare_set(key, self._seen, new, keep=False).decode()


def shows_life(store: RendezvousStore, limit_s: float) -> bool:
    """Wait for the next sign of life of any machine. False if there is none in time."""
    before, deadline = _sign(store), time.monotonic() + limit_s
    with waiting("a sign of life of the run's machines", limit_s):
        while time.monotonic() < deadline:
            if _sign(store) != before:
                return True
            time.sleep(timings.SIGN_LOOK_S)
    return False


def _sign(store: RendezvousStore) -> bytes:
    key = store_keys.sign_of_life()
    return store.get(key) if store.check([key]) else b""
