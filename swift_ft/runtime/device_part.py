"""A worker's device, as a part of it: the failure of a step may show there first."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.errors import first_line
from swift_ft.runtime.worker.part import Part, StepInfo
from swift_ft.torch_adapters.communication import take_device
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.step_failures import step_failures


class Device(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        waits: for what the training thread has enqueued.
        is_connection_error: whether an exception in a step comes from broken communication.
    """

    name = "device"

    def __init__(self, waits: DeviceWaits, is_connection_error: Callable[[BaseException], bool]) -> None:
        self._waits = waits
        self._is_connection_error = is_connection_error

    def start(self) -> None:
        take_device(self._waits.devices())
        self._waits.watch()

    def begin(self, step: StepInfo) -> None:
        step_failures.begin()
        self._waits.begin()

    def finish_step(self) -> str | None:
        """The body of a step is over. Returns why its communication failed; None if it did not."""
        try:
            self._waits.finish()
        except RuntimeError as error:
            if not self._is_connection_error(error):
                raise
            return first_line(error)
        return None

    def close(self) -> None:
        self._waits.close()
