"""What a worker logs of the messages that it sends and receives, and when that work is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swift_ft.errors import UnsupportedError
from swift_ft.logging.copying import Copier, Device
from swift_ft.logging.cuda import CudaDevice
from swift_ft.logging.ledger import Account, Ledger
from swift_ft.logging.options import LogOptions
from swift_ft.logging.record import Kind, MessageKey, checksum_of, dtype_name
from swift_ft.logging.writer import LogWriter

__all__ = ["MessageLog", "device_of"]


def device_of(device: torch.device) -> Device | None:
    """How messages on a device reach the host; None for the host itself.

    Raises:
        UnsupportedError: for another accelerator than a GPU that torch calls ``cuda``.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaDevice(device)
    raise UnsupportedError(f"Messages on {device} cannot be logged: only those of cpu and cuda can.")


class MessageLog:
    """Hands messages to the log: at once from host memory, through the copier from a device.

    All methods are for the training thread. The disk's and the device's part of the work is begun when the
    thread is about to wait for a message: then it competes with nobody.

    Args:
        options: the memory that page-locked buffers may take.
        ledger: where everything is accounted for.
        device_of: chooses the way to the host by a message's device.
        clock: seconds, monotonic.

    Attributes:
        writer: where messages go; None between two generations.
    """

    def __init__(
        self,
        options: LogOptions,
        ledger: Ledger,
        *,
        device_of: Callable[[torch.device], Device | None] = device_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._ledger = ledger
        self._device_of = device_of
        self._clock = clock
        self._copiers: dict[torch.device, Copier | None] = {}
        self._waits_since: float | None = None
        self._began: float | None = None
        self.writer: LogWriter | None = None

    def sent(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message was sent: keep its content."""
        self._ledger.add(Account(1, tensor.nbytes))
        if (copier := self._copier(tensor.device)) is not None:
            copier.keep(Kind.MESSAGE, key, tensor)
        else:
            self._open_writer().append_message(key, tensor)

    def received(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message has arrived: keep its checksum."""
        if (copier := self._copier(tensor.device)) is not None:
            copier.keep(Kind.RECEIPT, key, tensor)
        else:  # here and now, since the buffer is received into again
            self.received_elsewhere(key, checksum_of(tensor), tensor)

    def received_elsewhere(self, key: MessageKey, checksum: int, like: torch.Tensor) -> None:
        """A message has arrived, here or at a helper: keep the checksum that it had."""
        self._open_writer().append_receipt(key, checksum, dtype_name(like.dtype), tuple(like.shape))

    def overwriting(self, tensor: torch.Tensor) -> None:
        """A buffer is about to be received into."""
        if (copier := self._copier(tensor.device)) is not None:
            copier.before_overwriting(tensor)

    def bubble_begins(self) -> None:
        """The training thread is about to wait for a message."""
        for copier in self._in_use():
            copier.bubble_begins()
        if not self._in_use() and self._waits_since is None:  # a device measures by its own streams
            self._waits_since = self._clock()
        if self.writer is not None:
            self.writer.wake()

    def bubble_ends(self) -> None:
        """What it waited for is there. Without a bubble, nothing."""
        for copier in self._in_use():
            copier.bubble_ends()
        if self._waits_since is not None:
            self._ledger.add(Account(bubble_s=self._clock() - self._waits_since))
            self._waits_since = None

    def begin_iteration(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def end_iteration(self) -> Account:
        """Nothing is kept on a device for longer than an iteration."""
        self._waits_since = None
        if self._began is not None:
            self._ledger.add(Account(step_s=self._clock() - self._began))
            self._began = None
        for copier in self._in_use():
            copier.end_iteration()
        if self.writer is not None:
            self.writer.wake()
        return self._ledger.end_iteration()

    def interrupted(self) -> None:
        """The step was broken off: what it waited for never came."""
        self._waits_since = self._began = None
        for copier in self._in_use():
            copier.interrupted()

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was kept has been handed to the writer."""
        for copier in self._in_use():
            copier.drain(timeout_s)

    def _in_use(self) -> list[Copier]:
        return [copier for copier in self._copiers.values() if copier is not None]

    def _copier(self, where: torch.device) -> Copier | None:
        if where not in self._copiers:
            device = self._device_of(where)
            self._copiers[where] = None if device is None else self._new_copier(device)
        return self._copiers[where]

    def _new_copier(self, device: Device) -> Copier:
        return Copier(
            device,
            self._options.budget.memory_bytes,
            self._hand_on,
            self._ledger,
            on_full=lambda: self._open_writer().wake(),
            timeout_s=self._options.stall_timeout_s,
            clock=self._clock,
        )

    def _hand_on(self, kind: Kind, key: MessageKey, host: torch.Tensor, written: Callable[[], None]) -> None:
        writer = self._open_writer()
        (writer.append_message if kind is Kind.MESSAGE else writer.append_received)(key, host, written)

    def _open_writer(self) -> LogWriter:
        assert self.writer is not None
        return self.writer
