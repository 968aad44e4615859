"""The base class of rules: how the update of one kind of optimizer is inverted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

PARAM = "param"
"""The name of the parameter itself among the parts that a step changes."""

GRADIENT = "gradient"
"""The name of the gradient among those parts: some kernels write into it."""

SMALLEST_FACTOR = 2.0**-4
"""A value that the step multiplies by less than this is journaled: dividing would magnify the rounding error
more than 16 times."""


@dataclass
class Tensors:
    """Tensors as an update left them, in lists of equal length: one entry per parameter or slice of one.

    All entries share device and dtypes, and either all or none of them had state before the step.

    Attributes:
        params: parameters after the step; the rule writes those before it.
        grads: the gradients that the step used, unscaled and not negated. Read only, unless the kernel
            changed them.
        state: tensors of the optimizer's state after the step, by key; the rule writes those before it.
        steps: the step counter after the step, 0 where the optimizer has none.
        notes: numbers that :meth:`Rule.note` saved before the step, and ``Rule.left_behind`` after it.
        fresh: the state was made by this step and will be dropped: only the parameters matter.
        journaled: parts that a snapshot restores afterwards: the rule reads them and does not write them.
        gradient_changed: the kernel wrote into the gradients; the rule restores the original ones.
        exact: a residual corrects the rule's rounding errors.
    """

    params: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[float]
    notes: list[dict[str, float]]
    fresh: bool = False
    journaled: frozenset[str] = field(default_factory=frozenset)
    gradient_changed: bool = False
    exact: bool = False

    def computed(self, key: str) -> bool:
        """Whether the rule has to compute the previous value of a state tensor."""
        return not self.fresh and key not in self.journaled


class Rule(ABC):
    """Inverts one kind of optimizer's update, in place, in the parameters' own dtype.

    Operations run in the reverse of the kernel's order. Measurements show that this restores more bits than
    the same formula in float64, because it repeats the kernel's roundings.

    Attributes:
        keys: state tensors of the parameter's shape, in the order in which the rule restores them.
        small: state scalars that are noted before the step instead of being inverted.
        left_behind: state scalars that the step makes and the inverse reads.
        unreliable_kernels: device types and dtypes whose fused kernel is wrong: the update is
            journaled.
        shardable: the formula holds for a worker's shard of a parameter as well.
        elementwise: an element depends on no other, so slices of parameters can be inverted.
        keeps_rows: nothing is inverted: the rows that a sparse gradient names are journaled.
        error: the documented error of ``undo()`` without ``exact``, in words.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    small: ClassVar[tuple[str, ...]] = ()
    left_behind: ClassVar[tuple[str, ...]] = ()
    unreliable_kernels: ClassVar[frozenset[tuple[str, torch.dtype]]] = frozenset()
    shardable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = False
    error: ClassVar[str] = ""

    def makes(self, key: str, hyper: Mapping[str, Any]) -> bool:
        """Whether a first step under these hyper-parameters makes a state tensor of the parameter's shape."""
        del key, hyper
        return True

    def sizes(self, param: Tensor) -> dict[str, int]:
        """Bytes of state tensors of other shapes that a first step makes."""
        del param
        return {}

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parts that cannot be inverted under these hyper-parameters and need a snapshot.

        Args:
            hyper: one parameter group without its parameters.
            exact: a residual will be stored, so a badly conditioned inverse is good enough.
        """
        del hyper, exact
        return frozenset()

    def journaled_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """As :meth:`journaled`, for one parameter and its state just before the step."""
        del param, state
        return self.journaled(hyper, exact)

    def is_fully_journaled(self, param: Tensor, hyper: Mapping[str, Any]) -> bool:
        """Whether all parts of an update need a snapshot, because no formula describes it."""
        if hyper.get("differentiable") or (not self.shardable and hasattr(param, "_local_tensor")):
            return True
        return bool(hyper.get("fused")) and (param.device.type, param.dtype) in self.unreliable_kernels

    def note(self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Scalars that the inverse needs and the step overwrites, such as a norm: numbers or copies.

        Args:
            param: the parameter before the step.
            state: its state before the step; empty if there is none yet.
            hyper: its group's hyper-parameters.
        """
        del param, hyper
        return {key: _copy(state[key]) for key in self.small} if state else {}

    def touches_rows_only(self, hyper: Mapping[str, Any]) -> bool:
        """Whether a step with a sparse gradient changes only the rows that the gradient names."""
        del hyper
        return self.keeps_rows

    def changes_gradient(self, hyper: Mapping[str, Any], foreach: bool) -> bool:
        """Whether the kernel writes into the gradients that it is given."""
        del hyper, foreach
        return False

    @abstractmethod
    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """Writes the values before the step over those after it.

        Args:
            tensors: what the update left behind.
            hyper: the group's hyper-parameters as the step used them.
        """


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def number(value: Any) -> float:
    """A hyper-parameter, which may be a tensor of one element, as a number."""
    return float(value.item() if isinstance(value, Tensor) else value)


def is_lost(factor: float) -> bool:
    """Whether a multiplication by ``factor`` loses too much to be undone by a division."""
    return not abs(factor) >= SMALLEST_FACTOR  # also true for NaN


def signed(hyper: Mapping[str, Any]) -> float:
    """The sign with which gradients enter the update."""
    return -1.0 if hyper.get("maximize") else 1.0
