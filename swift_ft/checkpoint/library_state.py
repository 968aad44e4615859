"""State that a library keeps for itself: steps change it, and a script has no object to pass for it.

accelerate counts the microbatches in ``Accelerator.step``, to know which of them ends an accumulation. A
worker that was interrupted within one would go on counting, and average its gradients at other microbatches
than the others.
"""

from __future__ import annotations

import gc
import sys
from typing import Any


def library_state() -> dict[str, Any]:
    """The state of libraries in this process, by library and class; empty where none of them is imported."""
    if (module := sys.modules.get("accelerate.accelerator")) is None:
        return {}
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), module.Accelerator)]
    return {"accelerate.Accelerator": _Accumulation(found)} if found else {}


class _Accumulation:
    """The progress of accelerate's gradient accumulation between two updates.

    Args:
        accelerators: all of this process.
    """

    def __init__(self, accelerators: list[Any]) -> None:
        self._accelerators = accelerators

    def state_dict(self) -> dict[str, Any]:
        """Microbatches counted, and whether the next backward pass averages gradients."""
        return {
            "steps": [accelerator.step for accelerator in self._accelerators],
            "sync_gradients": [accelerator.sync_gradients for accelerator in self._accelerators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        for accelerator, step, sync in zip(
            self._accelerators, state["steps"], state["sync_gradients"], strict=True
        ):
            accelerator.step = step
            accelerator.sync_gradients = sync
