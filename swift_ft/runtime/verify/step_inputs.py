"""The inputs of a replica's step: what its gradients follow from, besides its batch and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from swift_ft.checkpoint.step.carried import CarriedVariables
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError

_MOST_BYTES = 1 << 20
"""The most that a worker's variables may be. A replica notes them with each step that is audited."""


class StepInputs:
    """See :class:`swift_ft.runtime.verify.own_gradients_part.Inputs`.

    Args:
        state: what the session protects.
        carried: the script's variables.
        digest: of what the script gives to the model.
        all_known: also the variables that are as they were at the start, which have a digest of 0.
    """

    def __init__(
        self,
        state: TrainingState,
        carried: CarriedVariables,
        digest: Callable[[Any], int],
        *,
        all_known: bool,
    ) -> None:
        self._state = state
        self._carried = carried
        self.digest = digest
        self._all_known = all_known

    def variables(self) -> tuple[str, dict[str, int]]:
        """See the protocol."""
        saved = self._carried.to_save()
        digests = self._carried.digests_of_earlier(saved)
        try:
            packed = self._state.pack(saved).hex()
        except UnsupportedError:
            packed = ""
        packed = packed if len(packed) <= _MOST_BYTES else ""
        return packed, {name: d for name, d in digests.items() if d or self._all_known}

    def put_variables(self, packed: str) -> None:
        """Give the script the variables that a worker has noted, if it could."""
        if packed:
            self._state.of_earlier_run = False  # a worker of this run has noted them
            self._carried.take_over(self._state.unpack(bytes.fromhex(packed)))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """See the protocol. Those that are not saved count, too."""
        found: dict[str, torch.Tensor] = {}
        for part, module in self._state.modules.items():
            found |= {f"the parameter {part}.{name}": one for name, one in module.named_parameters()}
            found |= {f"the buffer {part}.{name}": one for name, one in module.named_buffers()}
        return found
