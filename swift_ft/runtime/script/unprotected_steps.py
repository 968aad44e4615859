"""A script that makes a session and trains without its steps: nothing of that would be protected."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from swift_ft.errors import UsageError
from swift_ft.runtime.script.script_line import script_line

_ALLOWED = 2
"""Steps of an optimizer before the loop: some scripts make its state so."""


class UnprotectedSteps:
    """Counts the steps of a session's optimizers before its first iteration.

    Args:
        optimizers: of the session's state.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = [*optimizers]
        self._counted = 0
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if not any(optimizer is one for one in self._optimizers):
            return
        self._counted += 1
        if self._counted > _ALLOWED:
            self.close()
            raise UsageError(
                f"{script_line()} trains outside of session.steps(), where nothing is protected: write "
                "`for step in session.steps(iterations):` and, in it, `with step:` around the body.",
                alike=True,
            )
