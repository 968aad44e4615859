"""The watch for a worker that has become slow, as a part of it: steps that stall, links that are busy."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from types import FrameType

from swift_ft.coordination.progress import STANDS, ProgressBoard, Stand
from swift_ft.costs.slow_links import LinkSample
from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.observe.waits import FIRST_S, Announcements
from swift_ft.runtime.script.script_line import frames_of, lines_of, place_of
from swift_ft.runtime.slowness.hang_report import MOST_FRAMES, MOST_FRAMES_OF_WAITS, grouped, in_words
from swift_ft.runtime.worker.part import Part, StepInfo
from swift_ft.torch_adapters.comm_errors import is_backward, is_communication
from swift_ft.torch_adapters.link_times import LinkTimes
from swift_ft.units import format_seconds

_FIRST_ITERATION_S = 60.0
"""Much is made only once: connections, compiled code, workers of loaders."""
_FOR_OTHERS_S = 60.0
"""A worker that waits for another one leaves it to that one to speak first."""
_TIMES_LONGER = 5
_REMEMBERED = 32


_logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


# The watch says where a worker's script is when an iteration takes far longer than the ones before.
#
# No part of the runtime waits then: the script itself does, in a data loader, a lock, an evaluation. Nothing
# is done about it, since only its author knows whether it is right.


class StallWatch:
    """Watches the iterations of one worker, from a thread of its own.

    Args:
        rank: the worker.
        thread: the identifier of the thread that trains.
        tell: called with where the script is, each time that an announcement could be due.
        all_stand: where all workers are, in words; for one of them, which says it. None on the others.
    """

    def __init__(
        self,
        rank: int,
        thread: int,
        tell: Callable[[Stand], None] = lambda _: None,
        all_stand: Callable[[int], str] | None = None,
    ) -> None:
        self._rank = rank
        self._thread = thread
        self._tell = tell
        self._all_stand = all_stand
        # Owner of these: the training thread. The other one reads ``_current``.
        self._begun_at: float | None = None
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._current: _Iteration | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="swift-stall-watch", daemon=True).start()

    def begin(self, iteration: int, now: float | None = None) -> None:
        """A live iteration begins, and with it the previous one has ended, if it was live, too.

        Args:
            iteration: its number.
            now: a monotonic time; None for the clock's.
        """
        now = time.monotonic() if now is None else now
        if self._begun_at is not None:
            self._durations.append(now - self._begun_at)
        if self._current is not None and self._current.announced:
            _logger.info(
                "worker %d goes on with iteration %d after %s",
                self._rank,
                iteration,
                format_seconds(now - self._current.announcements.since),
                extra={"event": "iteration_over", "iteration": iteration},
            )
        self._begun_at = now
        longest = max(self._durations, default=None)
        limit_s = _FIRST_ITERATION_S if longest is None else max(FIRST_S, _TIMES_LONGER * longest)
        self._current = _Iteration(iteration, longest, limit_s, Announcements(now))

    def pause(self) -> None:
        """No live iteration runs from now on: a recovery or the end, whose waits are announced elsewhere."""
        self._current = self._begun_at = None

    def close(self) -> None:
        """Stop watching."""
        self.pause()
        self._closed.set()

    def look(self, now: float) -> None:
        """Announce the current iteration if that is due. Called about once per second.

        Args:
            now: a monotonic time.
        """
        current = self._current
        if current is None or not current.announcements.due(now):
            return
        so_far_s = now - current.announcements.since
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return
        waits = _waits_for_others(frame)
        stack = tuple(islice(lines_of(frame), MOST_FRAMES_OF_WAITS if waits else MOST_FRAMES))
        # Long before it is announced: the worker that says where all are reads it in that same look.
        self._tell(Stand(current.number, place_of(frame), waits, stack, is_backward(frame.f_code.co_name)))
        if so_far_s < current.limit_s or (waits and so_far_s < _FOR_OTHERS_S):
            return
        current.announced = True
        before = f"; the longest before took {format_seconds(current.longest)}" if current.longest else ""
        _logger.warning(
            "worker %d has been in iteration %d for %s%s. Its script is %s%s",
            self._rank,
            current.number,
            format_seconds(so_far_s),
            before,
            place_of(frame),
            ", and waits for other workers" if waits else "",
            extra={"event": "iteration_stalled", "iteration": current.number},
        )
        if self._all_stand is not None and so_far_s >= _FOR_OTHERS_S:
            _logger.warning(
                "iteration %d hangs: %s",
                current.number,
                self._all_stand(current.number),
                extra={"event": "iteration_hangs", "iteration": current.number},
            )

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self.look(time.monotonic())


class _Iteration:
    """A live iteration that has not ended.

    Args:
        longest: seconds of the longest one remembered; None in the first.
        limit_s: before that it is not announced.
        announcements: when to look again.
    """

    def __init__(
        self, number: int, longest: float | None, limit_s: float, announcements: Announcements
    ) -> None:
        self.number = number
        self.longest = longest
        self.limit_s = limit_s
        self.announcements = announcements
        self.announced = False


def _waits_for_others(frame: FrameType) -> bool:
    return any(is_communication(f.f_code.co_filename, f.f_code.co_name) for f in frames_of(frame))


class SlownessPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`. To be made in the thread that trains.

    Args:
        rank: the worker.
        workers: the number of them in the job.
        progress: where all workers tell where they stand, if an iteration does not end.
        machines: number of slots.
    """

    name = "slowness"

    def __init__(self, rank: int, workers: int, progress: ProgressBoard, *, machines: int) -> None:
        self._workers, self._machines, self._progress = workers, machines, progress
        all_stand = self._all_stand if rank == 0 else None
        self._stalls = StallWatch(rank, threading.get_ident(), self._tell, all_stand)
        self._links = LinkMeter()

    def _tell(self, stand: Stand) -> None:
        self._progress.add(**{STANDS: asdict(stand)})

    def _all_stand(self, iteration: int) -> str:
        try:
            progress = self._progress.read_all(self._machines)
        except RendezvousLostError as error:
            return f"where the other workers are is not known ({first_line(error)})"
        return in_words(grouped(progress, iteration), self._workers)

    @property
    def link(self) -> LinkSample | None:
        """The newest sample of this worker's busiest link; None without one. From any thread."""
        return self._links.newest

    def begin(self, step: StepInfo) -> None:
        if not step.replayed:
            self._stalls.begin(step.iteration)

    def pause(self) -> None:
        self._stalls.pause()

    def close(self) -> None:
        self._stalls.close()
        self._links.close()


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
