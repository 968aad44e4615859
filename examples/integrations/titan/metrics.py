"""What a job says about itself: losses, norms, and tokens per second."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist


class Metrics:
    """Of one worker. What was said so far is a state, so a resumed job continues the curves.

    Attributes:
        steps: that are complete.
        tokens: that the whole job has trained on.
        curves: name to step to value.
    """

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.curves: dict[str, dict[int, float]] = {}
        self._since, self._tokens_since = time.perf_counter(), 0

    def record(self, **values: float) -> None:
        """Note numbers after the last step, and print them on the first worker."""
        for name, value in values.items():
            self.curves.setdefault(name, {})[self.steps] = value
        if dist.get_rank() == 0:
            told = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            print(f"step {self.steps}: {told}  {self._tokens_per_second():.0f} tokens/s", flush=True)

    def trained_on(self, tokens: int) -> None:
        """A step is complete."""
        self.steps += 1
        self.tokens += tokens

    def _tokens_per_second(self) -> float:
        """Since the last call."""
        now = time.perf_counter()
        speed = (self.tokens - self._tokens_since) / max(now - self._since, 1e-9)
        self._since, self._tokens_since = now, self.tokens
        return speed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        curves = {name: dict(curve) for name, curve in self.curves.items()}
        return {"steps": self.steps, "tokens": self.tokens, "curves": curves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.steps, self.tokens, self.curves = state["steps"], state["tokens"], state["curves"]
