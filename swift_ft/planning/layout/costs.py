"""The cost of a stage: consecutive layers on some devices of one node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from swift_ft.costs.layer_profile import LayerProfile, copies_bytes
from swift_ft.costs.schedule_orders import Schedule, in_flight
from swift_ft.errors import UsageError
from swift_ft.planning.layout.makespan import StageTime

_WHOLE = 1000  # overheads are per mille, so that all numbers stay whole


class StageCosts:
    """Times and memory of stages. A stage lies inside a node, and its devices are a power of two.

    Args:
        memory_bytes: of a device; None without a limit.
        tensor_overhead: by which part each doubling of a stage's devices falls short: a stage takes
            ``(1 + tensor_overhead * log2(d)) / d`` of its time on one device.

    Raises:
        UsageError: if a number makes no sense.
    """

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        devices_per_node: int = 1,
        memory_bytes: int | None = None,
        tensor_overhead: float = 0.0,
    ) -> None:
        if devices_per_node < 1:
            raise UsageError(f"a node has {devices_per_node} devices: it must have at least 1")
        if not 0 <= tensor_overhead <= 1:
            raise UsageError(f"the overhead of a doubling is {tensor_overhead}: it must be between 0 and 1")
        self.layers = tuple(layers)
        self.devices_per_node = devices_per_node
        self.memory_bytes = memory_bytes
        self.sizes = tuple(1 << power for power in range(devices_per_node.bit_length()))
        share = round(tensor_overhead * _WHOLE)
        self._share = {size: _WHOLE + share * power for power, size in enumerate(self.sizes)}
        self._forward = (0, *accumulate(layer.forward_ns for layer in layers))
        self._backward = (0, *accumulate(layer.backward_ns for layer in layers))
        self._state = (0, *accumulate(layer.state_bytes for layer in layers))
        self._activations = (0, *accumulate(layer.activation_bytes for layer in layers))
        self._shares = any(layer.shared_with is not None for layer in layers)

    def time(self, first: int, end: int, devices: int) -> StageTime:
        """The time of layers ``first`` to ``end - 1`` on some devices."""
        return StageTime(*self.pair(first, end, devices))

    def pair(self, first: int, end: int, devices: int) -> tuple[int, int]:
        """As :meth:`time`, as forward and backward nanoseconds."""
        share, whole = self._share[devices], _WHOLE * devices
        return (
            -(-(self._forward[end] - self._forward[first]) * share // whole),
            -(-(self._backward[end] - self._backward[first]) * share // whole),
        )

    def least_ns(self, end: int) -> int:
        """No stages of the first ``end`` layers take less time in all: as on the devices of the best size."""
        work = self._forward[end] + self._backward[end]
        return min(work * self._share[size] // (_WHOLE * size) for size in self.sizes)

    def least_slowest_ns(self, end: int, devices: int) -> int:
        """No stages of the first ``end`` layers on so many devices have a faster slowest one."""
        return (self._forward[end] + self._backward[end]) // devices

    def memory(self, first: int, end: int, devices: int, kept: int) -> int:
        """Bytes on each device of a stage.

        Args:
            first: the number of its first layer.
            end: behind its last layer.
            devices: that share them.
            kept: microbatches whose activations it keeps.
        """
        state = self._state[end] - self._state[first]
        if self._shares:
            state += copies_bytes(self.layers, first, end)
        activations = (self._activations[end] - self._activations[first]) * kept
        return -(-(state + activations) // devices)

    def fits(self, first: int, end: int, devices: int, kept: int) -> bool:
        """Whether a stage fits into its devices' memory."""
        return self.memory_bytes is None or self.memory(first, end, devices, kept) <= self.memory_bytes

    def kept(self, schedule: Schedule, stages_behind: int, stages: int, microbatches: int) -> int:
        """Microbatches whose activations a stage keeps."""
        return in_flight(schedule, stages - 1 - stages_behind, workers=stages, microbatches=microbatches)
