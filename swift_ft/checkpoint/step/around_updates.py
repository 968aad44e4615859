"""Fingerprints of parameters around the updates of a step.

An undo leads from the values that an optimizer has left to those that it has found. It leads back to the
begin of the step only if nothing else has changed them: neither before the update nor after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from swift_ft.torch_core.fingerprints import Fingerprint, Sampler


@dataclass
class AroundUpdates:
    """Of one step.

    Attributes:
        begun: all parameters as the step began.
        found: by optimizer, its parameters as its update has found them.
        left: as its update has left them; the last one to step comes last.
        updated: parameters of the optimizers that have stepped, by ``id()``.
    """

    begun: Fingerprint
    found: dict[Optimizer, Fingerprint] = field(default_factory=dict)
    left: dict[Optimizer, Fingerprint] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)

    def changed_before(self) -> set[torch.Tensor]:
        """The parameters that were written to between the step's begin and their update."""
        return {tensor for found in self.found.values() for tensor in found.unlike(self.begun)}

    def changed_after(self, later: Fingerprint | None = None) -> set[torch.Tensor]:
        """The parameters that were written to after their update.

        Args:
            later: up to that moment; None for up to now.
        """
        changed: set[torch.Tensor] = set()
        for left in self.left.values():
            changed -= {*left.tensors}  # a later update
            changed |= left.unlike(Sampler().take(left.tensors) if later is None else later)
        return changed

    def moved_after(self) -> set[torch.Tensor]:
        """As :meth:`changed_after`, as far as counts and places tell. It reads no element."""
        moved = {optimizer: left.moved() for optimizer, left in self.left.items()}
        changed: set[torch.Tensor] = set()
        if any(moved.values()):
            for optimizer, left in self.left.items():
                changed -= {*left.tensors}
                changed |= {left.tensors[index] for index in moved[optimizer]}
        return changed
