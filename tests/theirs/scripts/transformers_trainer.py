"""Trains a tiny GPT-2 with the Trainer of transformers, as its documentation does: plainly, or in a session.

With ``--die WORKER:UPDATES:EVENT`` a worker kills itself when its Trainer calls that event of its callbacks,
once that many updates are done; once in all processes of the run.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.support.trainers import Dies, keep

SEQUENCE = 16
WINDOWS = 44
"""Per worker 11 batches of two: with two accumulated, the last update of an epoch has one."""

BY_STEPS: dict[str, Any] = {
    "max_steps": 9,
    "warmup_steps": 2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
}
BY_EPOCHS: dict[str, Any] = {
    "num_train_epochs": 4,
    "warmup_steps": 3,
    "eval_on_start": True,
    "logging_strategy": "epoch",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "report_to": "tensorboard",
}


class Windows(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(64, (length, SEQUENCE), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self._tokens[index].clone()
        labels[: index % 5] = -100  # so that replicas have other numbers of tokens
        return {"input_ids": self._tokens[index], "labels": labels}


class Stops(TrainerCallback):  # type: ignore[misc]
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.after


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    guesses, labels = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    return {"accuracy": float(np.mean(guesses[labels != -100] == labels[labels != -100]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=["steps", "epochs"], default="steps")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--die", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=0, help="updates, after which a callback ends it")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": SEQUENCE, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    own = args.folder / "trainer"
    callbacks: list[Any] = [Dies(args.die, args.folder / "died")] if args.die else []
    if args.stop_after:
        callbacks.append(Stops(args.stop_after))
    if args.by == "epochs":
        callbacks.append(EarlyStoppingCallback(1, early_stopping_threshold=1.0))
    kind: Any = Trainer
    session: dict[str, Any] = {}
    if not args.plain:
        from swift_ft.integrations.transformers import SwiftTrainer

        kind = SwiftTrainer
        session = {"store": str(args.folder / "store"), "checkpoint_every": args.checkpoint_every}
    trainer = kind(
        model,
        TrainingArguments(
            **{"report_to": "none", **(BY_STEPS if args.by == "steps" else BY_EPOCHS)},
            output_dir=str(own),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            max_grad_norm=0.5,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            dataloader_num_workers=args.workers,
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        ),
        train_dataset=Windows(WINDOWS, seed=1),
        eval_dataset=Windows(12, seed=2),
        compute_metrics=accuracy,
        callbacks=callbacks,
        **session,
    )
    result = trainer.train()
    keep(trainer, result.metrics, args.folder)


if __name__ == "__main__":
    main()
