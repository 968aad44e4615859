"""Uses of a Trainer that could not be repeated: each is refused as fit() begins, with its remedy."""

from __future__ import annotations

from typing import Any

from swift_ft.errors import UnsupportedError
from swift_ft.integrations.lightning.host import part

_callbacks = part("callbacks")

_CALLBACKS = {
    "StochasticWeightAveraging": (
        "makes another schedule in the middle of the training, which a replacement would not have: use "
        "EMAWeightAveraging, or average the checkpoints"
    ),
    "LearningRateFinder": (
        "trains on trial within fit(): use Tuner(trainer).lr_find(model) in a script of its own"
    ),
    "BatchSizeFinder": (
        "trains on trial within fit(): use Tuner(trainer).scale_batch_size(model) in a script of its own"
    ),
}


def refuse_what_cannot_be_repeated(trainer: Any) -> None:
    """Look at a Trainer as its fit() begins.

    Raises:
        UnsupportedError: a step of it could not be repeated.
    """
    for callback in trainer.callbacks:
        for name, reason in _CALLBACKS.items():
            if isinstance(callback, getattr(_callbacks, name)):
                raise UnsupportedError(f"SwiftStrategy: {name} {reason}.")
    if trainer.reload_dataloaders_every_n_epochs:
        raise UnsupportedError(
            "SwiftStrategy: with Trainer(reload_dataloaders_every_n_epochs=...) a replacement would have "
            "the loaders of the first epoch: leave it out, and let a sampler's set_epoch() change the data."
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UnsupportedError(
            "SwiftStrategy: Trainer(val_check_interval=...) by time is decided by each worker's own clock: "
            "give it as a number of batches, or as a fraction of an epoch."
        )
    strategy = trainer.strategy
    hooks = ("_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_model_averaging_period")
    if any(getattr(strategy, name, None) is not None for name in hooks):
        raise UnsupportedError(
            "SwiftStrategy: a communication hook of DDP keeps a state that no replica has: leave out "
            "ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper and model_averaging_period."
        )
