"""Habits of a script that nothing could protect: steps outside of the session's, loaders that communicate."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.runtime.script.script_line import script_line

_ALLOWED = 2
"""Steps of an optimizer before the loop: some scripts make its state so."""


_ACCELERATE = "accelerate.data_loader"


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


# Accelerate's prepared loaders do: one kind broadcasts every batch, the other the random state whenever an
# epoch begins. A replacement would wait there for workers that are in the middle of theirs.


def refuse_loaders_that_communicate() -> None:
    """Look for such loaders in this process. Costs nothing where accelerate is not imported.

    Raises:
        UnsupportedError: there is one; says what to do instead.
    """
    if (module := sys.modules.get(_ACCELERATE)) is None:
        return
    dispatcher, shard = module.DataLoaderDispatcher, module.DataLoaderShard
    for found in gc.get_objects():
        kind = type(found)  # isinstance() would ask proxies
        if issubclass(kind, dispatcher) or (issubclass(kind, shard) and found.rng_types):
            raise UnsupportedError(
                f"accelerate's {kind.__name__} communicates with all workers while it is read, in which a "
                "replacement would wait for ever: prepare() the model and the optimizer without the "
                "DataLoader, and look batches up by step.index."
            )
