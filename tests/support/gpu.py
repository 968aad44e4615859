"""Shared by the tests on a GPU: work of known duration, and a host that receives copied messages."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from swift_ft.logging import Direction, LogStats, MessageKey
from swift_ft.logging.format.record import RecordKind
from swift_ft.logging.writing.copier import Copier
from swift_ft.logging.writing.cuda_device import CudaDevice

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def key(microbatch: int = 0, iteration: int = 0) -> MessageKey:
    """The key of a forward message."""
    return MessageKey(iteration, microbatch, Direction.FORWARD, 0, 1, 0)


def compute_for(milliseconds: float) -> None:
    """Keeps the current stream busy; the host continues at once."""
    torch.cuda._sleep(int(milliseconds * _cycles_per_ms()))


@functools.cache
def _cycles_per_ms() -> float:
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # the first kernel loads code, and wakes the clock
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / begin.elapsed_time(end))


class Host:
    """Receives copied messages, and releases their buffers when the test says that they are written."""

    def __init__(self) -> None:
        self.got: list[tuple[RecordKind, MessageKey, torch.Tensor]] = []
        self.unwritten: list[Callable[[], None]] = []
        self.all_page_locked = True

    def __call__(
        self, kind: RecordKind, name: MessageKey, host: torch.Tensor, written: Callable[[], None]
    ) -> None:
        """Takes one copied message; ``written`` releases its buffer."""
        self.all_page_locked &= host.is_pinned()
        self.got.append((kind, name, host.clone()))  # the buffer is used again
        self.unwritten.append(written)

    def write_all(self) -> None:
        """Releases all buffers, as a writer does after it has written them."""
        while self.unwritten:
            self.unwritten.pop(0)()

    @property
    def keys(self) -> list[MessageKey]:
        """The keys of the messages, in the order in which they came."""
        return [name for _, name, _ in self.got]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The messages, in the order in which they came."""
        return [host for _, _, host in self.got]


class Setup:
    """A copier on the GPU's own streams."""

    def __init__(self, pool_bytes: int = 1 << 30, timeout_s: float = 60.0) -> None:
        self.host, self.stats = Host(), LogStats()
        self.copier = Copier(CudaDevice(DEVICE), pool_bytes, self.host, self.stats, timeout_s=timeout_s)

    def settle(self) -> None:
        """The device has done all of its work, and the copier has seen that."""
        torch.cuda.synchronize(DEVICE)
        self.copier.collect()

    def warm_up(self, *sizes: int) -> None:
        """Page-locked buffers exist (making one takes longer than copying into it), nothing is accounted."""
        for size in sizes:
            self.copier.keep(RecordKind.MESSAGE, key(), torch.zeros(size, dtype=torch.uint8, device=DEVICE))
        self.copier.end_iteration()
        self.settle()
        self.host.got.clear()
        self.host.write_all()
        self.stats.end_iteration()


class Link:
    """Messages from another stage, on a separate stream like NCCL's.

    The order is NCCL's, too: a receive begins after all earlier work of the compute stream, and
    the compute stream waits for its end where the schedule waits for it.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(DEVICE)

    def receive(self, milliseconds: float, fill: Callable[[], object] = lambda: None) -> torch.cuda.Event:
        """Begins a receive that takes this long and then fills the buffer."""
        self._stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(self._stream):
            compute_for(milliseconds)
            fill()
        arrival: torch.cuda.Event = self._stream.record_event()
        return arrival

    @staticmethod
    def wait(arrival: torch.cuda.Event) -> None:
        """The compute stream waits for the message."""
        torch.cuda.current_stream(DEVICE).wait_event(arrival)
