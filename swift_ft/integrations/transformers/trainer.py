"""The ``Trainer`` of Hugging Face, in a session.

The Trainer does one thing after the other: batches, backward passes, an update, and then log, evaluation and
checkpoint. A step of the session is the same, cut at another place:

    what is due after the last update  ─▶  batches  ─▶  backward passes  ─▶  update
    (log, evaluate, save, next epoch)

So all communication comes before the update, and whatever a loss interrupts is repeated from the beginning of
the step, with the state that was before it. After the last update there is one more step, for what is due
then.

Methods of the Trainer do all of the work, those that a subclass overrides included. Private ones, tested with
transformers 5.23 and accelerate 1.15:

    _inner_training_loop                what is overridden: the loop
    _init_training_state, _prepare_for_training, set_initial_training_values, _finalize_training
    _evaluate, _maybe_log_save_evaluate
    _clip_grad_norm, _get_grad_norm, _get_learning_rate, _track_num_input_tokens
    _tr_loss, _total_loss_scalar, _globalstep_last_logged
    _initial_global_step, _initial_num_input_tokens_seen
    accelerator.gradient_state._set_sync_gradients
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from swift_ft.integrations.transformers.batches import TrainBatches
from swift_ft.integrations.transformers.progress import Place, Progress
from swift_ft.integrations.transformers.refusals import (
    refuse_arguments,
    refuse_ends,
    refuse_loaders,
    refuse_models,
)
from swift_ft.session import Session


@dataclass(frozen=True)
class _Length:
    """The length of a training.

    Attributes:
        epochs: at most.
        updates: in an epoch.
        batches: in an epoch, on each worker.
        accumulated: batches of an update; fewer of the last one of an epoch, perhaps.
    """

    epochs: int
    updates: int
    batches: int
    accumulated: int

    def batches_of(self, update: int) -> int:
        """The number of batches of an update, by its number in its epoch."""
        rest = self.batches % self.accumulated
        return rest if rest and update == self.updates - 1 else self.accumulated


class SwiftTrainerMixin:
    """Makes a ``Trainer`` survive the loss of machines, with DDP.

    For any subclass of ``Trainer`` that leaves the loop to it, such as TRL's ``SFTTrainer``:

        class SwiftSFTTrainer(SwiftTrainerMixin, SFTTrainer): ...

    Args:
        args: for the Trainer.
        store: URL or path for the session's logs and checkpoints. Every machine must reach it.
        checkpoint_every: iterations between two of the session's checkpoints.
        session_options: further arguments of :class:`swift_ft.Session`.
        kwargs: for the Trainer.

    Attributes:
        session: protects the training; None before ``train()``.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    callback_handler: Any
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    get_train_dataloader: Any
    training_step: Any
    session: Session | None = None
    _place: Place | None = None

    def __init__(
        self,
        *args: Any,
        store: str,
        checkpoint_every: int = 100,
        session_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._session_options = {**(session_options or {}), "store": store}
        self._session_options["checkpoint_every"] = checkpoint_every
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's.

        Raises:
            UsageError: for what a session does not protect.
        """
        refuse_arguments(self, resume_from_checkpoint, trial)
        return super().train(None, None, *args, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(
        self, *_: Any, ignore_keys_for_eval: list[str] | None = None, **__: Any
    ) -> TrainOutput:
        trainer: Any = self
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        refuse_loaders(loader)
        epochs, updates, _, samples, _, batches, most = trainer.set_initial_training_values(self.args, loader)
        trainer._init_training_state(most, updates, epochs, None, None)
        trainer._prepare_for_training(most, loader, None)
        refuse_models(self.model_wrapped)
        loop = self._loop = _Loop(
            self, _Length(epochs, updates, batches, self.args.gradient_accumulation_steps), loader
        )
        loop.ignored = ignore_keys_for_eval
        loop.begin()
        self._place = loop.place
        session = self.session = Session(
            loop.to_protect(), **{"seed": self.args.seed, **self._session_options}
        )
        session.attach_ddp(self.model_wrapped)
        session._assembly.attached.keep_stop()
        stop = session._assembly.between.stop
        # One more: what is due after the last update.
        for step in session.steps(most + 1):
            with step:
                done = step.index  # batches are found by the place, which goes back with it
                goes_on = stop.has_ended_before(done)
                loop.step(goes_on=goes_on)
                if loop.place.over:
                    # Not by session.stop(), which wants a result noted after each step. All workers come to
                    # this one by what they have in common, and it is put back if the step is.
                    stop.at = done + 1
                if goes_on:
                    stop.extra += 1  # the run before has ended in one more, too
        refuse_ends(loop.place.over)
        return trainer._finalize_training(None, samples, loop.began)

    def store_flos(self) -> None:
        """As the Trainer's: it communicates. After the last step nobody would repeat that."""
        if self._place is None or not self._place.over:
            super().store_flos()  # type: ignore[misc]


class SwiftTrainer(SwiftTrainerMixin, Trainer):  # type: ignore[misc]
    """The ``Trainer`` of transformers, made to survive losses: see :class:`SwiftTrainerMixin`."""


class _Loop:
    """The loop of a Trainer, one step of the session after the other.

    Args:
        trainer: whose model, optimizer and scheduler are prepared.
        length: how long it trains.
        loader: gives its training data.

    Attributes:
        place: where it is.
        ignored: keys of the model's outputs that an evaluation does not gather.
        began: the time at which training began in this process.
    """

    def __init__(self, trainer: Any, length: _Length, loader: Any) -> None:
        args = trainer.args
        self._trainer = trainer
        self._length = length
        seed = args.seed if args.data_seed is None else args.data_seed
        self._batches = TrainBatches(loader, length.batches, seed=seed, rank=args.process_index)
        self.place = Place()
        self.ignored: list[str] | None = None
        self.began = time.time()
        self._progress: Progress

    def begin(self) -> None:
        """The training begins, in this process."""
        trainer = self._trainer
        trainer._initial_num_input_tokens_seen = trainer._initial_global_step = 0
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = 0
        trainer.model_wrapped.zero_grad()
        self._call("on_train_begin")
        self._progress = Progress(trainer, self.place, trainer.accelerator.gather)

    def to_protect(self) -> dict[str, Any]:
        """The state of the session."""
        trainer = self._trainer
        state = {
            "model": trainer.model_wrapped,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "progress": self._progress,
        }
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        return state

    def step(self, *, goes_on: bool = False) -> None:
        """Do what is due, and the next update.

        Args:
            goes_on: an earlier run was over here, and this one was started to go on.
        """
        trainer, place = self._trainer, self.place
        if goes_on:
            self._go_on()
        elif not place.begun:
            if trainer.args.eval_on_start:
                trainer._evaluate(None, self.ignored, skip_scheduler=True)
            self._call("on_epoch_begin")
            place.begun = True
        else:
            self._finish_update()
        if place.over:
            trainer.store_flos()
            self._progress.share_sums()
            return
        self._update()

    def _finish_update(self) -> None:
        """Do all that the Trainer does after an update, and at the end of an epoch."""
        trainer, place = self._trainer, self.place
        if place.updated:
            self._call("on_step_end")
            self._log_save_evaluate()
            place.updated = False
        if not (self._stops_epoch() or place.update == self._length.updates):
            return
        self._call("on_epoch_end")
        self._log_save_evaluate()
        place.over = trainer.control.should_training_stop or place.epoch + 1 == self._length.epochs
        if not place.over:
            self._begin_next_epoch()

    def _go_on(self) -> None:
        """Begin where an earlier run has ended, as the Trainer does that is resumed.

        That is within an epoch, if a callback has stopped training there. It may do so again.
        """
        trainer, place = self._trainer, self.place
        epoch_is_over = trainer.control.should_epoch_stop or place.update == self._length.updates
        place.over = epoch_is_over and place.epoch + 1 >= self._length.epochs
        if place.over:
            return
        trainer.control.should_training_stop = False
        if epoch_is_over:
            self._begin_next_epoch()
        else:
            self._call("on_epoch_begin")

    def _begin_next_epoch(self) -> None:
        self.place.epoch, self.place.update = self.place.epoch + 1, 0
        self._call("on_epoch_begin")

    def _update(self) -> None:
        """Backward passes for all batches of an update, and the update."""
        trainer, place, length = self._trainer, self.place, self._length
        count, first = length.batches_of(place.update), place.update * length.accumulated
        batches, items = trainer.get_batch_samples(
            self._batches.of(place.epoch, first, count), count, trainer.args.device
        )
        trainer.current_gradient_accumulation_steps = len(batches)
        self._call("on_step_begin")
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            trainer.accelerator.gradient_state._set_sync_gradients(is_last)
            with self._synchronized(is_last):
                self._add_loss(trainer.training_step(trainer.model_wrapped, batch, items))
            trainer.current_flos += float(trainer.floating_point_ops(batch))
            trainer._track_num_input_tokens(batch)
            if is_last:
                self._step_optimizer(first + number)
                return
            self._call("on_substep_end")
            if self._stops_epoch():
                return

    @contextlib.contextmanager
    def _synchronized(self, is_last: bool) -> Iterator[None]:
        """Replicas add up their gradients with the last batch of an update."""
        accelerator = self._trainer.accelerator
        each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        no_sync = partial(accelerator.no_sync, model=self._trainer.model_wrapped)
        with contextlib.nullcontext() if is_last or each else no_sync():
            yield

    def _add_loss(self, loss: Tensor) -> None:
        """To those since the last line of the log; NaN counts as their mean."""
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            updates = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / updates
        else:
            trainer._tr_loss += loss

    def _step_optimizer(self, done: int) -> None:
        """The update itself.

        Args:
            done: batches of this epoch, those of this update included.
        """
        trainer, place, model = self._trainer, self.place, self._trainer.model_wrapped
        norm = trainer._clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
        self._progress.grad_norm = trainer._get_grad_norm(model, grad_norm=norm)
        self._progress.share_sums()  # the last communication: nothing may fail after the update
        self._call("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call("on_optimizer_step")
        place.learning_rate = trainer._get_learning_rate()
        # Schedulers that look at a metric are stepped by an evaluation.
        if not trainer.accelerator.optimizer_step_was_skipped and not _looks_at_a_metric(
            trainer.lr_scheduler
        ):
            trainer.lr_scheduler.step()
        model.zero_grad()
        trainer.state.global_step += 1
        trainer.state.epoch = place.epoch + done / self._length.batches
        place.update += 1
        place.updated = True

    def _log_save_evaluate(self) -> None:
        trainer, progress = self._trainer, self._progress
        rate = self.place.learning_rate
        rest = trainer.model_wrapped, None, self.place.epoch, self.ignored, self.began, rate
        trainer._maybe_log_save_evaluate(trainer._tr_loss, progress.grad_norm, *rest)

    def _stops_epoch(self) -> bool:
        control = self._trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def _call(self, event: str) -> None:
        """Let the callbacks know."""
        trainer = self._trainer
        method = getattr(trainer.callback_handler, event)
        trainer.control = method(trainer.args, trainer.state, trainer.control)


def _looks_at_a_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"
