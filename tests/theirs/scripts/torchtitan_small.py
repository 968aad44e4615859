"""A small Llama 3 for torchtitan: ``--module tests.theirs.scripts.torchtitan_small --config small``."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

TEXT = "A machine dies, and the others keep their processes and their state. "


class Bytes(BaseTokenizer):  # type: ignore[misc]
    """A token for each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing to say."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        """Of a text, with an end."""
        return [*text.encode(), self.eos_id]

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Back."""
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        """Of bytes."""
        return 256


class Curves(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, with all their bits, in ``curves/rank<n>.jsonl`` of the folder of the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def _build_metric_logger(self, *, dump_folder: str, **_: Any) -> BaseLogger:
        return _Lines(Path(dump_folder, "curves", f"rank{dist.get_rank()}.jsonl"))


class _Lines(BaseLogger):  # type: ignore[misc]
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One line, without what is of this machine and its time."""
        kept = {name: value for name, value in metrics.items() if not name.startswith(OF_THE_MACHINE)}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **kept}) + "\n")


OF_THE_MACHINE = (
    "throughput",
    "tflops",
    "mfu",
    "time_metrics",
    "memory",
    "validation_metrics/throughput",
    "validation_metrics/memory",
)


class Checkpoints(CheckpointManager):  # type: ignore[misc]
    """torchtitan's own, in which a worker may die."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint of a step."""
        die_at("save", int(checkpoint_id.rpartition("-")[2]))
        return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)


class Mortal(Trainer):  # type: ignore[misc]
    """torchtitan's trainer, with a worker that dies once: ``DIES="backward 6 1 FILE"``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for part in self.model_parts:
            last = [*part.layers.values()][-1]
            last.register_forward_pre_hook(self._before_forward)
            last.register_forward_hook(self._after_forward)

    def _before_forward(self, block: nn.Module, _: Any) -> None:
        die_at("forward" if block.training else "validation", self.step)

    def _after_forward(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:  # gradients of what follows have been reduced by then
            output.register_hook(lambda _: die_at("backward", self.step))


def die_at(place: str, step: int) -> None:
    """Die like a machine without power, if this is the place, and no worker has died yet."""
    at, when, rank, marker = os.environ["DIES"].split()
    if (at, int(when), int(rank)) == (place, step, dist.get_rank()) and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _sentences(_: str) -> Dataset:
    return Dataset.from_dict({"text": [f"{number * 7919 % 1000}: {TEXT}" for number in range(200)]})


DATASETS["sentences"] = DatasetConfig("", _sentences, lambda sample: sample["text"])


def small() -> Trainer.Config:
    """The debug model, smaller: four layers of width 32."""
    spec = model_registry("debugmodel")
    del spec.model.layers[4:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    mortal = "DIES" in os.environ
    return (Mortal if mortal else Trainer).Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        hf_assets_path=".",
        tokenizer=Bytes.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=2, seq_len=32, steps=8, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="sentences"),
        metrics=Curves.Config(log_freq=1, disable_color_printing=True),
        debug=DebugConfig(seed=7),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="1F1B"),
        checkpoint=(Checkpoints if mortal else CheckpointManager).Config(
            enable=True, interval=4, last_save_model_only=False
        ),
        activation_checkpoint=None,
        validator=Validator.Config(
            enable=True, freq=5, steps=1, dataloader=HuggingFaceTextDataLoader.Config(dataset="sentences")
        ),
    )
