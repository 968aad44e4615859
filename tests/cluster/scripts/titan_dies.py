"""The trainer that is like torchtitan's. One machine dies within what the script does; all write their state.

DIES says where, as JSON: ``{"rank": 1, "step": 5, "where": "clip"}``; ``where`` is a key of ``PLACES``.
"""

import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from titan.trainer import Trainer
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from swift_ft.config.worker_context import WorkerContext
from tests.support.machines import die

titan_parallel: Any
titan_trainer: Any
titan_swift: Any
titan_parallel, titan_trainer, titan_swift = (
    importlib.import_module(name) for name in ("titan.parallel", "titan.trainer", "titan_swift")
)
CONTEXT = WorkerContext.from_env()
DIES = json.loads(os.environ.get("DIES", "{}"))
OUT = Path(os.environ["SWIFT_TEST_FOLDER"]) / "out"


class Doomed(Trainer):
    """Dies in a step, or after it, and ends with a file of its whole state."""

    def train_step(self) -> None:
        now = dist.get_rank(), self.metrics.steps
        if CONTEXT.started_in == 1 and now == (DIES.get("rank"), DIES.get("step")):
            PLACES[DIES["where"]]()
        super().train_step()

    def close(self) -> None:
        OUT.mkdir(exist_ok=True)
        state = {name: tree_map(local, part.state_dict()) for name, part in self.state.items()}
        torch.save(state, OUT / f"rank{dist.get_rank()}.pt")
        super().close()


def local(value: Any) -> Any:
    """A shard without its mesh."""
    return value.to_local() if isinstance(value, DTensor) else value


def die_after(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    function(*args, **kwargs)
    die()


def die_in_clip() -> None:
    """Its part of the all-reduce is sent, or nearly so."""
    titan_trainer.clip_grad_norm_ = clip_and_die


def clip_and_die(*args: Any) -> Any:
    dist.all_reduce = functools.partial(die_after, dist.all_reduce, async_op=True)
    return titan_parallel.clip_grad_norm_(*args)


def die_in_validation() -> None:
    """Its activations are sent, or nearly so."""
    titan_trainer.mean_of_last_stage = die_once_trained(titan_trainer.mean_of_last_stage)


def die_once_trained(mean: Callable[..., float]) -> Callable[..., float]:
    """The first call belongs to the step."""
    calls: list[None] = []

    def mean_or_die(*args: Any) -> float:
        calls.append(None)
        return die() if len(calls) > 1 else mean(*args)

    return mean_or_die


def die_in_save() -> None:
    """Data is written, and nothing is committed."""
    dcp.FileSystemWriter.finish = die


PLACES = {"clip": die_in_clip, "validation": die_in_validation, "save": die_in_save, "before": die}

titan_swift.Trainer = Doomed
titan_swift.main()
