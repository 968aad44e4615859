"""Writes to the rendezvous store that training does not wait for.

While all is well, the training thread does not touch the store: a store that stalls must cost no step. What a
worker notes for its replacement, and the events that it appends between two steps, are done here, one after
the other. Before it reports in a recovery it waits for them (:meth:`BackgroundWriter.flush`): who has read
all reports finds all notes.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial

from torch.distributed import DistError

from swift_ft.errors import RendezvousLostError
from swift_ft.observe.waits import waiting
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_LOST = (DistError, RuntimeError, RendezvousLostError)
_AGAIN_S = 1.0
"""Retry interval for writes that a lost store did not accept."""


class BackgroundWriter:
    """Sets and deletes keys of the rendezvous store, and does other errands, in a thread of its own.

    What a store that is lost has not taken is done again once it is back, perhaps twice.

    Of several values for one key that wait to be written, only the newest is.

    Args:
        rendezvous: a client of the rendezvous store.
    """

    def __init__(self, rendezvous: RendezvousStore) -> None:
        self._rendezvous = rendezvous
        self._changed = threading.Condition()
        # Guarded by the condition. Errands are numbered as they come, and done in this order.
        self._waiting: dict[Hashable, tuple[int, Callable[[], object]]] = {}
        self._number = 0  # of the last one
        self._under_way: int | None = None
        self._lost = False
        threading.Thread(target=self._work, name="swift-background-writer", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Set a key. Returns at once."""
        self._put(key, partial(self._rendezvous.set, key, value))

    def set_json(self, key: str, value: object) -> None:
        """Set a key to a value that the writer's thread turns into JSON. Returns at once.

        Args:
            key: the key.
            value: JSON-ready, and changed by nobody from now on.
        """
        self._put(key, lambda: self._rendezvous.set(key, json.dumps(value)))

    def delete(self, key: str) -> None:
        """Delete a key, if it is there. Returns at once."""
        self._put(key, partial(self._rendezvous.delete_key, key))

    def do(self, errand: Callable[[], object]) -> None:
        """Do something that waits for the store, after all that was put before. Returns at once.

        Args:
            errand: raises nothing but errors of a store that is lost. Anything else is a defect, and logged.
        """
        self._put(object(), errand)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is done that was put before. False if the store is lost, or silent for so long."""
        with waiting("the rendezvous store to take this worker's notes", timeout_s), self._changed:
            last = self._number
            done = self._changed.wait_for(lambda: self._lost or self._oldest() > last, timeout_s)
            return done and not self._lost

    @property
    def lost(self) -> bool:
        """Whether the store was gone when it was tried last."""
        return self._lost

    def _oldest(self) -> float:
        if self._under_way is not None:
            return self._under_way
        return next((number for number, _ in self._waiting.values()), math.inf)

    def _put(self, key: Hashable, errand: Callable[[], object]) -> None:
        with self._changed:
            self._waiting.pop(key, None)  # the order of keys is that of their newest values
            self._number += 1
            self._waiting[key] = self._number, errand
            self._changed.notify_all()

    def _next(self) -> Callable[[], object]:
        with self._changed:
            self._under_way = None
            self._changed.notify_all()  # for flush
            self._changed.wait_for(lambda: self._waiting)
            self._under_way, errand = self._waiting.pop(next(iter(self._waiting)))
            return errand

    def _work(self) -> None:
        while True:
            errand = self._next()
            while not self._is_done(errand):
                time.sleep(_AGAIN_S)

    def _is_done(self, errand: Callable[[], object]) -> bool:
        lost = False
        try:
            errand()
        except _LOST as error:  # the agent watches the store, and speaks of it
            _logger.debug("the rendezvous store takes no notes now: %s", error)
            lost = True
        except Exception:
            _logger.exception("an errand to the rendezvous store failed", extra={"event": "errand_failed"})
        with self._changed:
            self._lost = lost
            self._changed.notify_all()
        return not lost
