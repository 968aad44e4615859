"""Watches the rendezvous store from one machine: a host that vanishes says nothing, and nothing else asks it.

Only the kernel notices a host that lost its power, and nothing notices a store whose process is frozen: its
kernel still answers. So one thread tells the store again and again that this machine lives, and another one
looks at when it last answered. Training goes on while the store is lost or silent; a recovery waits for it.
"""

from __future__ import annotations

import logging
import threading
import time

from torch.distributed import DistError

from swift_ft.config import detection_timings as timings
from swift_ft.coordination.life_signs import LifeSigns
from swift_ft.errors import FencedError, RendezvousLostError, first_line
from swift_ft.launch.detection.policy import StoreNews, StoreSilence
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


class StoreWatch:
    """Says when the store has been silent for a while, and when it answers again.

    Args:
        store: a client of the rendezvous store.
        place: host and port of the store, for messages.
        limit_s: seconds that a recovery waits for it. The first warning comes after ten seconds, or half of
            these; later ones are ever less frequent.
        remedy: what brings the store back, for messages.
    """

    def __init__(
        self,
        store: RendezvousStore,
        place: str,
        *,
        limit_s: float,
        remedy: str = "",
    ) -> None:
        self._signs = LifeSigns(store)
        self._remedy = remedy
        self._place = place
        self._notice_s = min(timings.STORE_NOTICE_S, limit_s / 2)
        self._limit_s = limit_s
        self._interval_s = self._notice_s / 4
        self._closed = threading.Event()
        self._silence = StoreSilence(self._notice_s, time.monotonic())
        for target in (self._ask, self._watch):
            threading.Thread(target=target, name=f"swift-store{target.__name__}", daemon=True).start()

    @property
    def notice_s(self) -> float:
        """Seconds of silence after which the store is worth a warning."""
        return self._notice_s

    def silence_s(self) -> float:
        """Seconds since the store answered. It is told of four times in :attr:`notice_s`."""
        return self._silence.silence_s(time.monotonic())

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.is_set():
            try:
                self._signs.give()
            except FencedError:
                return  # the journal's readers end this machine
            except (DistError, RuntimeError, RendezvousLostError) as error:
                _logger.debug("the rendezvous store does not answer: %s", first_line(error))
            else:
                self._silence.answered(time.monotonic())
            self._closed.wait(self._interval_s)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            now = time.monotonic()
            match self._silence.look(now):
                case StoreNews.SILENT:
                    self._warn(self._silence.silence_s(now))
                case StoreNews.ANSWERS:
                    _logger.warning(
                        "the rendezvous store at %s answers again",
                        self._place,
                        extra={"event": "store_answers"},
                    )

    def _warn(self, silence_s: float) -> None:
        _logger.warning(
            "the rendezvous store at %s has not answered for %.0f s; training goes on. A recovery waits for "
            "it for %.0f s (--rendezvous-timeout). %s",
            self._place,
            silence_s,
            self._limit_s,
            self._remedy,
            extra={"event": "store_silent"},
        )
