"""The watch for a worker that has become slow, as a part of it: steps that stall, links that are busy."""

from __future__ import annotations

import threading

from swift_ft.costs.slow_links import LinkSample
from swift_ft.runtime.slowness.link_meter import LinkMeter
from swift_ft.runtime.slowness.stall_watch import StallWatch
from swift_ft.runtime.worker.part import Part, StepInfo


class SlownessPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`. To be made in the thread that trains.

    Args:
        rank: the worker.
    """

    name = "slowness"

    def __init__(self, rank: int) -> None:
        self._stalls = StallWatch(rank, threading.get_ident())
        self._links = LinkMeter()

    @property
    def link(self) -> LinkSample | None:
        """What is known of this worker's busiest link. From any thread."""
        return self._links.newest

    def begin(self, step: StepInfo) -> None:
        if not step.replayed:
            self._stalls.begin(step.iteration)

    def pause(self) -> None:
        self._stalls.pause()

    def close(self) -> None:
        self._stalls.close()
        self._links.close()
