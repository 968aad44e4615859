"""Loops in the form of torch's tutorials, with a session's lines: FSDP2 with checkpoints, and a pipeline.

tutorials.py fsdp2|pipeline STORE OUT
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor

import swift_ft

FORM, STORE, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
STEPS = 10


class Transformer(nn.Module):
    """Embedding, blocks, norm and head, as the tutorials have it."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(64, 16)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
                for i in range(layers)
            }
        )
        self.norm: nn.Module | None = nn.LayerNorm(16)
        self.output: nn.Module | None = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))


def fsdp2(rank: int) -> None:
    """Shards over all workers, clips, and saves a checkpoint of its own now and then."""
    model = Transformer()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)

    session = swift_ft.Session({"model": model, "optim": optim}, store=STORE, snapshot_every=3)

    def save() -> None:
        model_state, optim_state = get_state_dict(model, optim)
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, checkpoint_id=OUT / f"checkpoint-{session.iteration}")

    session.between(save, every=5)
    for step in session.steps(STEPS):
        with step:
            x = torch.randint(0, 64, (4, 8))
            loss = loss_fn(model(x), x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optim.step()
            optim.zero_grad()
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in get_model_state_dict(model).items()
    }
    torch.save(full, OUT / f"rank{rank}.pt")


def pipeline(rank: int) -> None:
    """Splits the model by hand: each rank deletes what is not its own."""
    model = Transformer(layers=4)
    if rank == 0:
        for i in ("2", "3"):
            del model.layers[i]
        model.norm = model.output = None
    else:
        for i in ("0", "1"):
            del model.layers[i]
        model.tok_embeddings = None
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=STORE, checkpoint_every=4)
    session.attach_pipeline(schedule)
    for step in session.steps(STEPS):
        with step:
            x = torch.randint(0, 64, (8, 8))
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                losses: list[torch.Tensor] = []
                schedule.step(target=x, losses=losses)
            optimizer.step()
    torch.save(model.state_dict(), OUT / f"rank{rank}.pt")


def main() -> None:
    """Trains one worker's part."""
    OUT.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if FORM == "fsdp2":
        init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    {"fsdp2": fsdp2, "pipeline": pipeline}[FORM](dist.get_rank())
    dist.destroy_process_group()


main()
