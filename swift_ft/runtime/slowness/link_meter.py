"""Measures this worker's links while it trains, in a thread of its own."""

from __future__ import annotations

import logging
import threading

from swift_ft.costs.slow_links import LinkSample
from swift_ft.torch_adapters.link_times import LinkTimes

_logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class LinkMeter:
    """Looks at the connections of this process once a second.

    Attributes:
        newest: of the last second in which enough was sent; None before.
    """

    def __init__(self) -> None:
        self.newest: LinkSample | None = None  # owner: the meter's thread; others read it
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="swift-link-meter", daemon=True).start()

    def close(self) -> None:
        """Measure no more."""
        self._closed.set()

    def _run(self) -> None:
        times, number = LinkTimes(), 0
        while not self._closed.wait(_INTERVAL_S):
            try:
                use = times.take()
            except OSError as error:
                _logger.debug("links are not measured any more: %s", error)
                return
            if use is not None:
                number += 1
                self.newest = LinkSample(number, use.peer, use.busy, use.bytes_per_s)
