"""Logs the messages that a worker sends and receives, where possible while training waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swift_ft.errors import UnsupportedError
from swift_ft.logging.format.record import MessageKey, RecordKind, checksum_of, dtype_name
from swift_ft.logging.options import LogOptions
from swift_ft.logging.stats import IterationStats, LogStats
from swift_ft.logging.writing.copier import Copier, Device
from swift_ft.logging.writing.cuda_device import CudaDevice
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.logging.writing.writer import LogWriter

_WORTH_WAKING_BYTES = 2**20
"""Least to wake the writer for while training waits: threads that take turns cost more (decision 43)."""


def device_of(device: torch.device) -> Device | None:
    """The operations that bring messages from a device to the host; None for the host itself.

    Raises:
        UnsupportedError: for an accelerator other than ``cuda``.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaDevice(device)
    raise UnsupportedError(f"Messages on {device} cannot be logged: use cpu or cuda.")


class MessageLog:
    """Hands messages to the log: at once from host memory, through the copier from a device.

    All methods are for the training thread. Work for the disk and the device begins when that thread is about
    to wait for a message, so it does not compete with training.

    Args:
        options: the memory limit for page-locked buffers.
        stats: receives all costs.
        device_of: returns how messages of a device reach the host.
        clock: seconds, monotonic.
        in_doubt: whether an abort may have changed what has arrived, and all that follows from it, without a
            word. Nothing of that is logged: the iteration is repeated, and sends what is right.

    Attributes:
        writer: where messages go; None between two generations.
        muted: nothing is kept: the step will be computed again, and only that is logged.
        in_doubt: see above.
    """

    def __init__(
        self,
        options: LogOptions,
        stats: LogStats,
        *,
        device_of: Callable[[torch.device], Device | None] = device_of,
        clock: Callable[[], float] = time.monotonic,
        in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        self._options = options
        self._stats = stats
        self._device_of = device_of
        self._clock = clock
        self._copiers: dict[torch.device, Copier | None] = {}
        self._in_use: list[Copier] = []  # those of them that there are: asked for in each bubble
        self._waits_since: float | None = None
        self._began: float | None = None
        self._has_waited = False  # in the running step
        self._rest_is_due = False  # what the last step has left to write is written in the next bubble
        self.writer: LogWriter | None = None
        self.muted = False
        self.in_doubt = in_doubt

    def sent(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message was sent: keep its content."""
        if self._keeps_nothing:
            return
        self._stats.logged(tensor.nbytes)
        if (copier := self._copier(tensor.device)) is not None:
            self._keep(copier, RecordKind.MESSAGE, key, tensor)
        else:
            self._open_writer().append_message(key, tensor)

    def received(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message has arrived: keep its checksum."""
        if self._keeps_nothing:
            return
        if (copier := self._copier(tensor.device)) is not None:
            self._keep(copier, RecordKind.RECEIPT, key, tensor)
        else:  # at once, since the buffer will be reused
            self.received_elsewhere(key, checksum_of(tensor), tensor)

    def received_elsewhere(self, key: MessageKey, checksum: int, like: torch.Tensor) -> None:
        """A message has arrived, here or at a helper: keep its checksum."""
        if self._keeps_nothing:
            return
        self._open_writer().append_receipt(key, checksum, dtype_name(like.dtype), tuple(like.shape))

    @property
    def _keeps_nothing(self) -> bool:
        return self.muted or self.in_doubt()

    def overwriting(self, tensor: torch.Tensor) -> None:
        """A message is about to be received into a buffer."""
        if (copier := self._copier(tensor.device)) is not None:
            try:
                copier.before_overwriting(tensor)
            except LogTimeoutError as error:
                self._suspend(error)

    def bubble_begins(self) -> None:
        """The training thread is about to wait for a message."""
        if self._in_use:  # a device measures by its own streams
            for copier in self._in_use:
                copier.bubble_begins()
        elif self._waits_since is None:
            self._waits_since = self._clock()
        self._has_waited = True
        if self.writer is not None:
            self.writer.wake(0 if self._rest_is_due else _WORTH_WAKING_BYTES)
            self._rest_is_due = False

    def bubble_ends(self) -> None:
        """The message has arrived. Does nothing without a bubble."""
        for copier in self._in_use:
            copier.bubble_ends()
        if self._waits_since is not None:
            self._stats.waited(self._clock() - self._waits_since)
            self._waits_since = None

    def begin_iteration(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def end_iteration(self) -> IterationStats:
        """A step ends: copies what is still on a device, and returns the costs of the iteration.

        Where the log's memory stays full, since the store hangs, what is on the device is in the log's gap.
        """
        self._waits_since = None
        if self._began is not None:
            self._stats.add(IterationStats(step_s=self._clock() - self._began))
            self._began = None
        for copier in self._in_use:
            try:
                copier.end_iteration()
            except LogTimeoutError as error:
                self._suspend(error)
        # Not at each message, and not as the next step begins where that will wait itself: the writer's
        # thread would compete with training for the interpreter (decision 43).
        if self.writer is not None and not self._has_waited:
            self.writer.wake()
        self._rest_is_due, self._has_waited = self._has_waited, False
        return self._stats.end_iteration()

    def interrupted(self) -> None:
        """The step was interrupted: the message that it waited for never arrived.

        What it has kept on a device is lost if it is in doubt.
        """
        self._waits_since = self._began = None
        self._has_waited = False
        for copier in self._in_use:
            copier.interrupted()

    def drain(self, timeout_s: float) -> None:
        """Waits until the writer has all kept messages.

        Raises:
            LogTimeoutError: that took longer than ``timeout_s``. The writer gets none of them any more.
        """
        try:
            for copier in self._in_use:
                copier.drain(timeout_s)
        except LogTimeoutError:  # else the next generation's log would get them
            self._drop()
            raise

    def _keep(self, copier: Copier, kind: RecordKind, key: MessageKey, tensor: torch.Tensor) -> None:
        if not self._open_writer().is_in_gap(key.iteration):  # else the copier could wait for room again
            copier.keep(kind, key, tensor)

    def _suspend(self, error: LogTimeoutError) -> None:
        """The log has a gap from here on, if it may have one."""
        if not self._open_writer().suspend(str(error), self._drop()):
            raise error

    def _drop(self) -> int:
        return max((copier.drop() for copier in self._in_use), default=-1)

    def _copier(self, where: torch.device) -> Copier | None:
        if where not in self._copiers:
            device = self._device_of(where)
            self._copiers[where] = None if device is None else self._new_copier(device)
        return self._copiers[where]

    def _new_copier(self, device: Device) -> Copier:
        copier = Copier(
            device,
            self._options.budget.memory_bytes,
            self._deliver,
            self._stats,
            on_full=lambda: self._open_writer().wake(),
            timeout_s=self._options.stall_timeout_s,
            clock=self._clock,
            in_doubt=self.in_doubt,
        )
        self._in_use.append(copier)
        return copier

    def _deliver(
        self, kind: RecordKind, key: MessageKey, host: torch.Tensor, written: Callable[[], None]
    ) -> None:
        writer = self._open_writer()
        (writer.append_message if kind is RecordKind.MESSAGE else writer.append_received)(key, host, written)

    def _open_writer(self) -> LogWriter:
        assert self.writer is not None
        return self.writer
