"""Uses of a Trainer that could not be repeated: each is refused as fit() begins, with its remedy."""

from __future__ import annotations

from typing import Any

from swift_ft.errors import UnsupportedError
from swift_ft.integrations.lightning.host import part

_callbacks = part("callbacks")

_AVERAGE = (
    "average the checkpoints, or keep an AveragedModel of torch in the LightningModule, and update it in "
    "on_train_batch_end()"
)
_CALLBACKS = {
    "StochasticWeightAveraging": (
        "makes another schedule in the middle of the training, which a replacement would not have: "
        f"{_AVERAGE}"
    ),
    "WeightAveraging": (  # and EMAWeightAveraging
        "exchanges the trained weights for averaged ones in each validation, which a loss in it would leave "
        f"exchanged: {_AVERAGE}"
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
            if isinstance(callback, getattr(_callbacks, name, ())):  # an earlier Lightning lacks some
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


def refuse_another_beginning(trainer: Any) -> None:
    """Look at a Trainer as its loop begins: before, not every strategy has said where it goes on from.

    Raises:
        UnsupportedError: it goes on from a checkpoint of its own.
    """
    if trainer.ckpt_path:
        raise UnsupportedError(
            "SwiftStrategy: fit(ckpt_path=...) and the session's store would both say where to go on: leave "
            "it out. `swift-run --resume` goes on from the store, and load_from_checkpoint() takes weights."
        )
