"""The gradients that a ``GradScaler`` has unscaled in this step, of which its ``state_dict()`` says nothing.

It refuses to unscale those of an optimizer twice before its ``update()``, which an interrupted step does not
reach.

Private parts used (tested on torch 2.11 to 2.14): ``GradScaler._per_optimizer_states``, by ``id()`` of
optimizers: the stage of each, and whether infinite gradients were found. A scaler that is off has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.amp import GradScaler

Stages = Mapping[int, Mapping[str, Any]]
"""By ``id()`` of an optimizer."""


def stages_of(scaler: GradScaler) -> Stages:
    """The present stage of each optimizer's gradients: empty after an ``update()``."""
    if not scaler.is_enabled():
        return {}
    return {number: dict(stage) for number, stage in scaler._per_optimizer_states.items()}


def put_stages(scaler: GradScaler, stages: Stages) -> None:
    """The gradients are where they were. Without stages, as after an ``update()``."""
    if not scaler.is_enabled():
        return
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update({number: dict(stage) for number, stage in stages.items()})
