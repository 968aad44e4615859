"""Trains an adapter of a tiny GPT-2 with TRL's SFTTrainer: plainly, or in a session.

``--die`` as in ``transformers_trainer.py``.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.support.trainers import Dies, keep

WORDS = ["<pad>", "<end>", "a", "machine", "dies", "and", "others", "go", "on", "from", "this", "step"]


def texts(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    picks = [torch.randint(2, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[number] for number in pick) for pick in picks]})


def tokenizer() -> Any:
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(WORDS))}, "<end>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--die", default="")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    kind: Any = SFTTrainer
    session: dict[str, Any] = {}
    if not args.plain:
        from swift_ft.integrations.transformers import SwiftTrainerMixin

        class SwiftSFTTrainer(SwiftTrainerMixin, SFTTrainer):  # type: ignore[misc]
            pass

        kind = SwiftSFTTrainer
        session = {"store": str(args.folder / "store"), "checkpoint_every": args.checkpoint_every}
    trainer = kind(
        model,
        SFTConfig(
            output_dir=str(args.folder / "trainer"),
            max_steps=7,
            max_length=16,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            report_to="none",
            use_cpu=True,
            bf16=False,
            ddp_backend="gloo",
            disable_tqdm=True,
            dataset_num_proc=None,
        ),
        train_dataset=texts(22, seed=1),
        eval_dataset=texts(6, seed=2),
        processing_class=tokenizer(),
        peft_config=LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM"
        ),
        callbacks=[Dies(args.die, args.folder / "died")] if args.die else [],
        **session,
    )
    result = trainer.train()
    keep(trainer, result.metrics, args.folder)


if __name__ == "__main__":
    main()
