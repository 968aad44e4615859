"""Updates made within a backward pass: all that they have used must be the same when ``step()`` is called."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.tensors import same_values, version_of
from swift_ft.undo.snapshot import Hyper


class EarlyUpdates:
    """The gradients and options of parameters that are updated already, as their backward pass has left them.

    Args:
        groups: all groups of the optimizer.
        updated: the parameters.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], updated: Collection[Tensor]) -> None:
        self._gradients = {parameter: (parameter.grad, _version(parameter)) for parameter in updated}
        self._options = [
            (group, Hyper(group).values)
            for group in groups
            if any(parameter in self._gradients for parameter in group["params"])
        ]

    def changed(self, optimizer: Optimizer, updated: Collection[Tensor]) -> str | None:
        """Describe what ``step()`` would use and the updates have not; None if there is nothing.

        Args:
            optimizer: as its ``step()`` begins.
            updated: parameters whose updates still count.
        """
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "a GradScaler scales their gradients"
        for parameter in updated:
            gradient, version = self._gradients.get(parameter, (None, 0))
            if parameter.grad is not gradient or _version(parameter) != version:
                return "their gradients have changed since, as clipping or a GradScaler does it"
        for group, options in self._options:
            for name in options.keys() | group.keys() - {"params"}:
                if not same_values(options.get(name), group.get(name), incomparable=True):
                    return f"{name!r} of their group has changed since"
        return None


def _version(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else version_of(parameter.grad)
