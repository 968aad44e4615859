"""Strategies for ``Trainer(strategy=...)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from swift_ft.integrations.lightning.host import part
from swift_ft.integrations.lightning.loop import drive
from swift_ft.integrations.lightning.protection import Protection
from swift_ft.integrations.lightning.refusals import refuse_what_cannot_be_repeated
from swift_ft.optim import wrap_optimizer
from swift_ft.session import Session
from swift_ft.torch_adapters.fsdp import replicas_of

_strategies = part("strategies")
_FITTING = part("trainer.states").TrainerFn.FITTING
_OF_SESSION = inspect.signature(Session).parameters.keys() - {"state"}


class _Protected:
    """The additions of both strategies to Lightning's own."""

    optimizers: Any
    lightning_module: Any

    def __init__(self, *, store: str, **options: Any) -> None:
        of_session = {name: value for name, value in options.items() if name in _OF_SESSION}
        super().__init__(**{name: value for name, value in options.items() if name not in of_session})
        remove = super().remove_checkpoint  # type: ignore[misc]
        self._protection = Protection(self._attach, remove, {"store": store, **of_session})

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        if self.lightning_module.trainer.state.fn == _FITTING:
            self._protection.hold_back(self.lightning_module.trainer)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == _FITTING:
            refuse_what_cannot_be_repeated(trainer)
            drive(trainer.fit_loop, self._protection)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        # A loss in a validation comes after the update, which the repeated step must not find.
        for optimizer in self.optimizers:
            wrap_optimizer(optimizer, exact=True)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        # Lightning zeroes gradients and computes new ones within the optimizer's step. What looks at it as it
        # begins would see those of the step before.
        kind = getattr(type(optimizer), "_plain_class", type(optimizer))
        if kind.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS):
            with torch.enable_grad():
                result = closure()
            return super().optimizer_step(optimizer, lambda: result, model, **options)  # type: ignore[misc]
        return super().optimizer_step(optimizer, closure, model, **options)  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if (saved := self._protection.saved) is not None:
            saved.save(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        if (saved := self._protection.saved) is not None:
            saved.remove(filepath)
        else:
            super().remove_checkpoint(filepath)  # type: ignore[misc]

    def _attach(self, session: Session) -> None:
        raise NotImplementedError


class SwiftStrategy(_Protected, _strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Lightning's ``DDPStrategy``, whose ``fit()`` survives the loss of machines.

    Args:
        store: URL or path for the session's checkpoints. Every machine must reach it.
        options: further arguments of :class:`swift_ft.Session`, and of ``DDPStrategy``.
    """

    def _attach(self, session: Session) -> None:
        session.attach_ddp(self.model)


class SwiftModelParallelStrategy(_Protected, _strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """Lightning's ``ModelParallelStrategy``, whose ``fit()`` survives the loss of machines.

    What ``configure_model()`` has sharded within replicas (HSDP) comes from another replica after a loss. For
    all else give ``snapshot_every=...``: then another machine's memory holds it.

    Args:
        store: URL or path for the session's checkpoints. Every machine must reach it.
        options: further arguments of :class:`swift_ft.Session`, and of ``ModelParallelStrategy``.
    """

    def _attach(self, session: Session) -> None:
        # Without replicas and snapshots the session says what is missing.
        if len(replicas_of([self.model])) > 1 or "snapshot_every" not in self._protection.options:
            session.attach_fsdp(self.model)
