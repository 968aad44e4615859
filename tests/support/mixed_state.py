"""An optimizer as people write them, whose state is of many kinds."""

from __future__ import annotations

from typing import Any

import torch


class Mixed(torch.optim.Optimizer):
    """Numbers and text between its tensors, and text that is no name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.5), "how": "by hand"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates with an average of gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                if not held:
                    held.update(average=torch.zeros_like(parameter), steps=0, how="mean")
                    held["square"] = torch.zeros_like(parameter)
                held["steps"] += 1
                held["average"].lerp_(parameter.grad, 0.5)
                held["square"].lerp_(parameter.grad.square(), 0.5)
                parameter -= group["lr"] * held["average"]
