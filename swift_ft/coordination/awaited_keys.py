"""Keys that all workers publish once: a thread reads them as soon as all of them are there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistError, DistStoreError

from swift_ft.errors import RendezvousLostError
from swift_ft.observe.waits import waiting
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_ONE_WAIT = timedelta(hours=1)


class AwaitedKeys:
    """Waits in the store for some keys, in one exchange, and reads their values in another.

    Args:
        rendezvous: a client of the rendezvous store.
        keys: that will be set, once each.
        then: called with their values in the order of the keys, in the thread that waited.
    """

    def __init__(
        self, rendezvous: RendezvousStore, keys: Sequence[str], then: Callable[[list[bytes]], None]
    ) -> None:
        self._rendezvous = rendezvous
        self._keys = keys
        self._then = then
        self._thread = threading.Thread(target=self._run, name="swift-awaited-keys", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float, what: str) -> None:
        """Wait for the end of the thread, once all keys are set. Logs a warning if that takes too long.

        Args:
            timeout_s: seconds to wait.
            what: is done with the values, for the message.
        """
        with waiting(what, timeout_s):
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.warning("%s took more than %g s", what, timeout_s, extra={"event": "keys_not_read"})

    def _run(self) -> None:
        try:
            while not self._all_are_there():
                pass
            values = self._rendezvous.multi_get(self._keys)
        except (DistError, RuntimeError, RendezvousLostError) as error:
            _logger.debug("the rendezvous store is lost: %s", error)  # the journal's thread reports it
            return
        self._then(values)

    def _all_are_there(self) -> bool:
        began = time.monotonic()
        try:
            self._rendezvous.wait(self._keys, _ONE_WAIT)
        except DistStoreError:
            if time.monotonic() - began < _ONE_WAIT.total_seconds():
                raise  # the store is lost
            return False
        return True
