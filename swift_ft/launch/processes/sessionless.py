"""A check of a script that makes no session: it is stopped once it has trained for two steps."""

from __future__ import annotations

from collections import Counter

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from swift_ft.errors import UsageError
from swift_ft.observe.checked import CheckFolder

_STEPS = 2


class SessionlessSteps:
    """Counts the steps of each optimizer, until there is a session.

    Args:
        folder: of the check; it says whether there is one.
        rank: this worker.
    """

    def __init__(self, folder: CheckFolder, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._steps = Counter[int]()
        register_optimizer_step_post_hook(self._stepped)  # for good: within a step no hook can be removed

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if self._folder.has_session(self._rank):
            return
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] >= _STEPS:
            raise UsageError(
                f"The script has trained for {_STEPS} steps and made no swift_ft.Session: put one around its "
                "loop.",
                alike=True,
                exit_code=1,
            )
