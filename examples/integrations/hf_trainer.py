"""Trains a tiny GPT-2 with the Trainer of Hugging Face, with DDP, accumulation, a schedule and evaluation.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12 point=reduce" \
    --preload transformers.trainer examples/integrations/hf_trainer.py --store runs/hf
"""

import argparse
from pathlib import Path

import torch
from help_topics import HelpTopics
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from swift_ft.integrations.transformers import SwiftTrainer

SEQUENCE = 32


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of text, as a causal language model of transformers takes them."""

    def __init__(self, length: int, seed: int) -> None:
        self._text = HelpTopics(batch_size=1, sequence=SEQUENCE, seed=seed)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens, which are the labels, too."""
        tokens = self._text[index][0][0]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--store", default="runs/hf", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": SEQUENCE, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = SwiftTrainer(
        model,
        TrainingArguments(
            output_dir=f"{args.store}-trainer",
            max_steps=args.iterations,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            use_cpu=True,
            ddp_backend="gloo",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Windows(256, seed=0),
        eval_dataset=Windows(16, seed=1),
        store=args.store,
        checkpoint_every=args.checkpoint_every,
    )
    trainer.train()

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        timed = ("runtime", "per_second")
        curves = [
            {key: value for key, value in entry.items() if not key.endswith(timed)}
            for entry in trainer.state.log_history
        ]
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "model": trainer.model}
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**saved, "curves": curves}, f"{args.out}/rank{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
