"""A small training that uses one or more features of torch, in one kind of parallelism.

    supports.py PARALLELISM FEATURES STORE [DROPOUT]     FEATURES are joined by "+"

Each worker writes the state that it ends with.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import swift_ft
from tests.support.copies import wait_for_copy

PARALLELISM, FEATURES, STORE = sys.argv[1], set(sys.argv[2].split("+")), sys.argv[3]
DROPOUT = float(sys.argv[4]) if len(sys.argv) > 4 else 0.2
ITERATIONS, CHECKPOINT_EVERY, MICROBATCHES = 5, 2, 2
SIZES = {  # of pp, dp_replicate, dp_shard, tp
    "pipeline": (2, 1, 1, 1),
    "DDP": (1, 2, 1, 1),
    "DDP x pipeline": (2, 2, 1, 1),
    "HSDP": (1, 2, 2, 1),
    "FSDP2, memory checkpoints": (1, 1, 2, 1),
    "TP x pipeline": (2, 1, 1, 2),
    "TP, memory checkpoints": (1, 1, 1, 2),
}[PARALLELISM]
WORDS, WIDTH, BATCH, SEQUENCE = 32, 16, 4, 6


class Block(nn.Module):
    """With dropout, so that what is computed again has to draw again what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def compute(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if "checkpointing" in FEATURES:
            y: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return y
        return self.compute(x)


class Part(nn.Module):
    """One of the parts of the model, or all of it."""

    def __init__(self, index: int, parts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        blocks = [Block() for _ in range(4)]
        if "tied" in FEATURES:
            head.weight = embedding.weight if parts == 1 else nn.Parameter(embedding.weight.detach().clone())
        self.embedding = embedding if index == 0 else None
        self.blocks = nn.Sequential(*blocks[4 * index // parts : 4 * (index + 1) // parts])
        self.head = head if index == parts - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.blocks(x)
        return x if self.head is None else self.head(x)

    @property
    def shared(self) -> nn.Parameter | None:
        """What first and last stage share, if they do."""
        if "tied" not in FEATURES:
            return None
        found = [p for name, p in self.named_parameters() if name in ("embedding.weight", "head.weight")]
        return found[0] if found else None


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def autocast() -> contextlib.AbstractContextManager[object]:
    precisions = {"autocast": torch.bfloat16, "scaler": torch.float16}
    chosen = [precision for feature, precision in precisions.items() if feature in FEATURES]
    return torch.autocast("cpu", chosen[0]) if chosen else contextlib.nullcontext()


def batch_of(iteration: int, replica: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(
        WORDS, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(100 * iteration + replica)
    )
    return words[:, :-1].contiguous(), words[:, 1:]  # torch 2.11 takes no other input for a pipeline


class Worker:
    """One worker: a stage of a pipeline, a replica, or both."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("pp", "replicate", "shard", "tp"))
        stages, replicas, shards, slices = SIZES
        self.stages, self.index = stages, mesh.get_local_rank("pp")
        self.replica = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
        self.pp = mesh.get_group("pp")
        self.part = Part(self.index, stages)
        if "compile" in FEATURES:
            self.part.compile(backend="aot_eager")
        if "inductor" in FEATURES:
            self.part.compile()
        self.model: nn.Module = self.part
        if slices > 1:
            for block in self.part.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if shards > 1:
            for block in self.part.blocks:
                fully_shard(block, mesh=mesh["replicate", "shard"] if replicas > 1 else mesh["shard"])
            fully_shard(self.part, mesh=mesh["replicate", "shard"] if replicas > 1 else mesh["shard"])
        elif replicas > 1:
            self.model = DistributedDataParallel(self.part, process_group=mesh.get_group("replicate"))
        kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}}
        options: dict[str, Any] = next((kinds[name] for name in kinds if name in FEATURES), {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        if replicas > 1:
            swift_ft.wrap_optimizer(self.optimizer, exact=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled="scaler" in FEATURES, growth_interval=2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if "scaler" in FEATURES:
            self.state["scaler"] = self.scaler
        self.ema: AveragedModel | None = None
        if "EMA" in FEATURES:
            self.ema = AveragedModel(self.part, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.state["ema"] = self.ema
        self.schedule: Any = None
        if stages > 1:
            stage = PipelineStage(self.model, self.index, stages, torch.device("cpu"), group=self.pp)
            self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=self.scaled_loss)
        self.session = self.attach()

    def attach(self) -> Any:
        options: dict[str, Any] = {"snapshot_every": 2} if "memory" in PARALLELISM else {}
        session: Any = swift_ft.Session(self.state, store=STORE, checkpoint_every=CHECKPOINT_EVERY, **options)
        if self.schedule is not None:
            session.attach_pipeline(self.schedule)
        if isinstance(self.model, DistributedDataParallel):
            session.attach_ddp(self.model)
        if PARALLELISM == "HSDP":
            session.attach_fsdp(self.model)
        if self.stages > 1 and self.part.shared is not None:
            session.tie(self.part.shared, (0, self.stages - 1))
        return session

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.scaler.scale(loss_fn(logits, targets))
        return loss

    def train(self) -> None:
        for step in self.session.steps(ITERATIONS):
            if "memory" in PARALLELISM and step.index == 3:  # a fault that comes after it takes for granted
                wait_for_copy(self.session, 2)
            with step:
                x, y = batch_of(step.index, self.replica)
                with autocast():
                    self.forward_backward(x, y)
                if self.schedule is not None and "tied" in FEATURES:
                    self.session.sum_tied_gradients()
                self.agree_on_overflow()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                if self.ema is not None:
                    self.ema.update_parameters(self.part)

    def forward_backward(self, x: Tensor, y: Tensor) -> None:
        if self.schedule is not None:
            self.scaler.scale(torch.zeros(()))  # all stages have a scale, and the last one uses it
            self.schedule.step(*[x] if self.index == 0 else [], target=y, return_outputs=False)
        else:
            self.scaled_loss(self.model(x), y).backward()

    def agree_on_overflow(self) -> None:
        """One stage that skips its update makes all others skip theirs."""
        if self.schedule is None or "scaler" not in FEATURES:
            return
        grads = [local(p.grad) for p in self.part.parameters() if p.grad is not None]
        bad = torch.stack([grad.isfinite().logical_not().any() for grad in grads]).any().float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self.pp)
        if bad:
            grads[0].fill_(float("inf"))

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        state = {name: tree_map(local, value.state_dict()) for name, value in self.state.items()}
        torch.save(state, folder / f"rank{dist.get_rank()}.pt")


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def main(make: Callable[[], Worker] = Worker) -> None:
    worker = make()
    worker.train()
    worker.write(Path(os.environ["SWIFT_TEST_FOLDER"]) / "out")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
