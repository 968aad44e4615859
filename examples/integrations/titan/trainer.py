"""The trainer: everything but the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from help_topics import HelpTopics
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from titan.config import JobConfig
from titan.metrics import Metrics
from titan.model import Stage, build_stage, loss_fn
from titan.parallel import DATA, build_mesh, clip_grad_norm_, mean_of_last_stage, shard, split


class Trainer:
    """One worker's part of a job.

    Attributes:
        model: this worker's stage, wrapped in DDP if there are replicas of it, and nothing is sharded.
        schedule: of the pipeline.
        optimizer: of the stage's parameters.
        state: what a run needs to continue.
    """

    def __init__(self, config: JobConfig) -> None:
        dist.init_process_group("gloo")
        self.config, training = config, config.training
        self.mesh = build_mesh(config.parallelism)
        pp = self.mesh["pp"]
        index, num_stages = pp.get_local_rank(), pp.size()
        self.model = self._parallelized(build_stage(config.model, index, num_stages, training.seed))
        self.stage = PipelineStage(self.model, index, num_stages, torch.device("cpu"), group=pp.get_group())
        schedule = get_schedule_class(config.parallelism.schedule)
        self.schedule = schedule(self.stage, training.microbatches, loss_fn=loss_fn)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, foreach=True)
        self.lr_scheduler = LambdaLR(self.optimizer, self._lr_factor)
        self.metrics = Metrics()
        self.readers = self.mesh[DATA].size()
        batch_size = training.microbatches * training.microbatch_size
        self.training_data = HelpTopics(batch_size, training.sequence, seed=training.seed)
        self.validation_data = HelpTopics(batch_size, training.sequence, seed=training.seed + 1)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "metrics": self.metrics,
        }

    def _lr_factor(self, step: int) -> float:
        """A linear warm-up, then half a cosine."""
        training = self.config.training
        if step < training.warmup_steps:
            return (step + 1) / training.warmup_steps
        rest = max(1, training.steps - training.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * (step - training.warmup_steps) / rest))

    def _parallelized(self, stage: Stage) -> nn.Module:
        """A stage on this worker: split, sharded, or replicated by DDP, as the mesh says."""
        replicas, shards, parts = (self.mesh[name] for name in (*DATA, "tp"))
        if parts.size() > 1:
            split(stage, parts)
        if shards.size() > 1 or (replicas.size() > 1 and parts.size() > 1):
            shard(stage, self.mesh[DATA])
        elif replicas.size() > 1:
            return DistributedDataParallel(stage, process_group=replicas.get_group())
        return stage

    @property
    def replicated(self) -> bool:
        """Whether another worker holds the same."""
        return self.mesh["dp_replicate"].size() > 1

    @property
    def uses_ddp(self) -> bool:
        """Whether replicas average their gradients by DDP; otherwise by FSDP2."""
        return isinstance(self.model, DistributedDataParallel)

    def _batch(self, data: HelpTopics, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this worker; the parts of a split stage have the same."""
        replica, part = (self.mesh.get_local_rank(name) for name in DATA)
        return data[number * self.readers + replica * self.mesh["dp_shard"].size() + part]

    def train_step(self) -> None:
        """Forward, backward, clip, update."""
        tokens, targets = self._batch(self.training_data, self.metrics.steps)
        losses: list[Tensor] = []
        with self._autocast():
            self.schedule.step(*self._inputs(tokens), target=targets, losses=losses, return_outputs=False)
        pp = self.mesh["pp"].get_group()
        norm = clip_grad_norm_(self.model.parameters(), self.config.training.max_norm, pp)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.metrics.trained_on(tokens.numel() * self.readers)
        loss = mean_of_last_stage(losses, self.mesh)
        self.metrics.record(loss=loss, norm=norm.item(), lr=float(self.lr_scheduler.get_last_lr()[0]))

    def validate(self) -> float:
        """The mean loss on batches that are not trained on."""
        losses: list[Tensor] = []
        self.model.eval()
        for number in range(self.config.validation.steps):
            tokens, targets = self._batch(self.validation_data, number)
            with torch.no_grad(), self._autocast():
                self.schedule.eval(*self._inputs(tokens), target=targets, losses=losses)
        self.model.train()
        return mean_of_last_stage(losses, self.mesh)

    def validated(self, loss: float) -> None:
        """Note what a validation has found."""
        self.metrics.record(validation_loss=loss)

    def save(self) -> None:
        """The trainer's own checkpoint, as DCP writes it, of all workers."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        folder = Path(self.config.checkpoint.folder, f"step-{self.metrics.steps}")
        dcp.save({**model, **optimizer, "metrics": self.metrics.state_dict()}, checkpoint_id=folder)

    def is_due(self, interval: int) -> bool:
        """Whether something that is done every so many steps follows the last one."""
        return self.metrics.steps % interval == 0

    def close(self) -> None:
        """The last words."""
        dist.destroy_process_group()

    def _autocast(self) -> torch.autocast:
        precision = getattr(torch, self.config.training.precision)
        return torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32)

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (tokens,) if self.stage.is_first else ()
