"""A Hugging Face ``Trainer`` whose inner loop runs in a session. It uses no private part of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

import swift_ft


class SwiftTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` that survives the loss of machines, with DDP.

    ``train()`` is a loop over the Trainer's own ``training_step()``, ``evaluate()``, ``log()`` and
    ``save_model()``, and calls the same callbacks. All else is inherited.

    Args:
        store: URL or path for the session's checkpoints.
        checkpoint_every: iterations between two of them.
        args: of ``Trainer``.
        kwargs: of ``Trainer``.
    """

    optimizer: Any
    control: Any

    def __init__(self, *args: Any, store: str, checkpoint_every: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.max_steps <= 0:
            raise ValueError("Set TrainingArguments(max_steps=...): a session counts in steps.")
        self._store, self._checkpoint_every = store, checkpoint_every
        self.session: swift_ft.Session | None = None

    def train(self, *_: Any, **__: Any) -> TrainOutput:
        """Train ``max_steps`` steps. The session resumes, so ``resume_from_checkpoint`` is ignored."""
        args = self.args
        self.create_optimizer_and_scheduler(num_training_steps=args.max_steps)
        swift_ft.wrap_optimizer(self.optimizer, exact=True)
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        session = self.session = swift_ft.Session(
            {
                "model": self.model_wrapped,
                "optimizer": self.optimizer,
                "scheduler": self.lr_scheduler,
                "progress": _Progress(self.state),
            },
            store=self._store,
            checkpoint_every=self._checkpoint_every,
            seed=args.seed,
        )
        session.attach_ddp(self.model_wrapped)
        batches = swift_ft.data.IndexedBatches(
            self.train_dataset,
            batch_size=args.train_batch_size,
            shuffle=True,
            seed=args.seed,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            num_replicas=session.replicas,
            rank=session.replica,
            collate_fn=self.data_collator,
        )
        self._say_all_about_the_run(batches.batches_per_epoch)
        for step in session.steps(args.max_steps):
            with step:
                self._update(step.index, batches)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        return TrainOutput(self.state.global_step, float("nan"), {})

    def _say_all_about_the_run(self, batches_per_epoch: int) -> None:
        """What callbacks look up."""
        args, state = self.args, self.state
        state.max_steps = args.max_steps
        state.num_train_epochs = -(-args.max_steps * args.gradient_accumulation_steps // batches_per_epoch)
        state.logging_steps, state.eval_steps, state.save_steps = (
            args.logging_steps,
            args.eval_steps,
            args.save_steps,
        )
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        self._batches_per_epoch = batches_per_epoch
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.control = self.callback_handler.on_train_begin(args, state, self.control)

    def _update(self, index: int, batches: Any) -> None:
        """One update, of as many batches as are accumulated."""
        args = self.args
        parts = self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
        losses: list[Tensor] = []
        for part in range(parts - 1):
            with self.accelerator.no_sync(self.model_wrapped):
                losses.append(self.training_step(self.model_wrapped, batches[index * parts + part]))
        losses.append(self.training_step(self.model_wrapped, batches[(index + 1) * parts - 1]))
        if args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), args.max_grad_norm)
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        self.lr_scheduler.step()
        self.model_wrapped.zero_grad()
        self.state.global_step = index + 1
        self.state.epoch = (index + 1) * parts / self._batches_per_epoch
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)
        self._say_what_is_due(torch.stack(losses).sum())

    def _say_what_is_due(self, loss: Tensor) -> None:
        """What the callbacks asked for."""
        if self.control.should_log:
            mean = self.accelerator.gather(loss).mean().item()
            self.log({"loss": round(mean, 4), "learning_rate": self.lr_scheduler.get_last_lr()[0]})
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self.save_model(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")
        if self.control.should_training_stop and self.state.global_step < self.args.max_steps:
            raise ValueError("A session trains max_steps steps: leave out callbacks that stop it earlier.")


class _Progress:
    """What a ``TrainerState`` has counted and logged, as a part of the session's state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        return {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "log_history": [dict(entry) for entry in state.log_history],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self._state).update(saved)
