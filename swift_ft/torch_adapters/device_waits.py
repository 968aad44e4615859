"""Waits of the host for its device, before an update and at the end of a step, where an abort is silent.

An operation of NCCL returns when it is enqueued, and so does an update behind it. If a peer is dead, the
device waits for it until the operation is aborted, which leaves anything in the tensors; and then the device
updates with that. So the host waits for the gradients before an update is enqueued, in a way that an abort
ends. No update is ever made of an operation that was aborted, and none that was must be undone. What computes
gradients after that wait, a closure or a pre-hook of the script's, is waited for once more.

What communicates after the last update of a step is waited for when the step ends. As a rule nothing does:
then a step is complete when its last update is enqueued, since all that comes later runs behind it.

The device has nothing to do while the host enqueues the first kernels of an update. Steps over gloo do not
wait: there, the host does not go on before an operation is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_core.optimizers import call_behind_hooks

Arguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]
Wait = Callable[[], object]


class DeviceWaits:
    """Waits for what the training thread has enqueued.

    Args:
        waits: end with an abort, and know whether one is silent and whether anything communicates.
        devices: that a step computes on.
    """

    def __init__(self, waits: AbortableWaits, devices: Callable[[], Iterable[torch.device]]) -> None:
        self._waits = waits
        self.devices = devices
        self._hook: Any = None

    def watch(self) -> None:
        """From now on, wait before the updates of all optimizers of this process."""
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def close(self) -> None:
        """Wait no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin(self) -> None:
        """A step begins."""
        self._waits.begun()  # what communicates in it need not tell

    def finish(self) -> None:
        """Wait until all that communicates so far has arrived, if the host does not know that yet.

        Raises:
            RuntimeError: it was aborted, or took longer than the script's group allows.
        """
        waits = self._waits
        if not waits.silent or not waits.unawaited:
            return
        wait_for_devices(waits, {*self.devices()})
        waits.awaited()

    def _before_update(
        self, optimizer: Optimizer, args: Arguments, kwargs: KeywordArguments
    ) -> tuple[Arguments, KeywordArguments] | None:
        """As torch calls it. Returns arguments for the step, where they are others."""
        if torch.compiler.is_compiling():  # it would become a part of the graph
            return None
        self.finish()
        if not self._waits.silent:
            return None
        call_behind_hooks(optimizer, self._behind_hooks)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._finished(args[1]), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._finished(closure)}
        return None

    def _behind_hooks(self) -> None:
        if self._hook is not None:  # it may come from a step that failed, in a loop that is over
            self.finish()

    def _finished(self, closure: Callable[..., object]) -> Callable[..., object]:
        """A closure whose gradients have arrived when it returns."""

        @functools.wraps(closure)
        def compute(*args: object, **kwargs: object) -> object:
            loss = closure(*args, **kwargs)
            self.finish()
            return loss

        return compute


def wait_for_devices(waits: AbortableWaits, devices: Iterable[torch.device]) -> None:
    """Wait on the host for all that the current streams of some devices were given so far.

    Args:
        waits: end with an abort.
        devices: those that have no streams, such as the host, are passed over.

    Raises:
        RuntimeError: the groups were aborted, or it took longer than the script's group allows.
    """
    ends = [_end_of_stream(device) for device in devices if device.type not in ("cpu", "meta")]
    try:
        waits.call_or_abort(functools.partial(_wait_for_all, ends))
    except RuntimeError as error:
        step_failures.note(error, is_over=waits.over)
        raise


def _end_of_stream(device: torch.device) -> Wait:
    """A function that waits for the end of a device's current stream, as it is now."""
    wait: Wait = torch.accelerator.current_stream(device).record_event().synchronize
    return wait


def _wait_for_all(ends: Iterable[Wait]) -> None:
    for wait in ends:
        wait()
