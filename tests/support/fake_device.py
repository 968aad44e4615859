"""An accelerator whose streams are lists, and whose time the test moves.

Each copy is made when its turn comes, and takes the bytes that the source has then. A copy that is too
late, or a source that is released too early, gives other bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swift_ft.logging.writing.copier import Mark


class FakeMark:
    """See :class:`swift_ft.logging.writing.copier.Mark`."""

    def __init__(self) -> None:
        self.at: float | None = None

    def reached(self) -> bool:
        """Whether the stream has passed the mark."""
        return self.at is not None

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two marks that were reached."""
        assert isinstance(earlier, FakeMark)
        assert self.at is not None
        assert earlier.at is not None
        return self.at - earlier.at


@dataclass(frozen=True)
class _Work:
    given_at: float
    seconds: float
    after: FakeMark | None
    do: Callable[[], object] | None
    mark: FakeMark | None


class FakeStream:
    """Work in order; each piece takes some time, and may wait for a mark of the other stream."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.free_at = 0.0
        self._clock = clock
        self._work: deque[_Work] = deque()

    def give(
        self,
        seconds: float = 0.0,
        *,
        after: FakeMark | None = None,
        do: Callable[[], object] | None = None,
        mark: FakeMark | None = None,
    ) -> None:
        """Adds a piece of work to the end."""
        self._work.append(_Work(self._clock(), seconds, after, do, mark))

    def advance(self) -> bool:
        """Does what can be done by now; False if nothing could."""
        done = False
        while self._work:
            work = self._work[0]
            if work.after is not None and work.after.at is None:
                return done
            waited_until = work.after.at if work.after is not None and work.after.at is not None else 0.0
            end = max(self.free_at, work.given_at, waited_until) + work.seconds
            if end > self._clock():
                return done
            self._work.popleft()
            if work.do is not None:
                work.do()
            if work.mark is not None:
                work.mark.at = end
            self.free_at, done = end, True
        return done


class FakeDevice:
    """See :class:`swift_ft.logging.writing.copier.Device`.

    Args:
        copy_s: seconds that the copy of one message takes.
    """

    def __init__(self, copy_s: float = 1.0) -> None:
        self.compute, self.side = FakeStream(self.clock), FakeStream(self.clock)
        self.copy_s = copy_s
        self.now = 0.0
        self._lock = threading.Lock()
        self.buffers: list[int] = []  # sizes that were made

    def clock(self) -> float:
        """The time on the device, in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Time passes on the device and the host."""
        with self._lock:
            self.now += seconds
            while self.compute.advance() | self.side.advance():
                pass

    def mark(self) -> FakeMark:
        """A mark behind all computation so far."""
        mark = FakeMark()
        self.compute.give(mark=mark)
        self.advance(0.0)
        return mark

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> tuple[Mark, Mark]:
        """Copies on the side stream, after a mark. Returns the marks before and after the copies."""
        assert isinstance(after, FakeMark)
        begin, end = FakeMark(), FakeMark()
        self.side.give(after=after, mark=begin)
        for source, destination in pairs:
            self.side.give(self.copy_s, do=_copying(source, destination))
        self.side.give(mark=end)
        self.advance(0.0)
        return begin, end

    def compute_waits_for(self, mark: Mark) -> None:
        """Computation continues only after the mark."""
        assert isinstance(mark, FakeMark)
        self.compute.give(after=mark)

    def buffer(self, size: int) -> torch.Tensor:
        """A host buffer of ``size`` bytes."""
        self.buffers.append(size)
        return torch.empty(size, dtype=torch.uint8)


def _copying(source: torch.Tensor, destination: torch.Tensor) -> Callable[[], object]:
    return lambda: destination.copy_(source)
