"""A CUDA device as the copier sees it: events, a side stream, page-locked memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swift_ft.logging.writing.copier import Mark


class _Event:
    """A timed event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaDevice:
    """One GPU, with a side stream for copies (:class:`swift_ft.logging.writing.copier.Device`).

    Args:
        device: the GPU that messages are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        """An event at the end of the current stream, on which stages compute."""
        return self._recorded(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> tuple[Mark, Mark]:
        """Asynchronous copies into page-locked memory."""
        assert isinstance(after, _Event)
        self._side.wait_event(after.event)
        begin = self._recorded(self._side)
        with torch.cuda.stream(self._side):
            for source, destination in pairs:
                # Resolved on the device: the host would resolve a lazy conjugate before its bytes arrive.
                destination.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)
        return begin, self._recorded(self._side)

    def compute_waits_for(self, mark: Mark) -> None:
        """The current stream waits for an event."""
        assert isinstance(mark, _Event)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def buffer(self, size: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _recorded(self, stream: torch.cuda.Stream) -> _Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return _Event(event)
