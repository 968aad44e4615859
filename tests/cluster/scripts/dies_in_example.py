"""An example that trains without a pipeline. Workers die at a point of an iteration; all write their state.

    dies_in_example.py EXAMPLE ARGUMENTS

SWIFT_TEST_DEATH is JSON: the rank that dies, the iteration, and the point: ``"before all_to_all 3"`` is the
third such collective of that worker in the iteration, ``"after"`` it is begun; ``"before step"`` and ``"after
step"`` are of the optimizer. ``"copied"`` is the memory checkpoint that is waited for at the begin.
SWIFT_TEST_AT is an iteration before which all write, too, what they have of each tensor.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import swift_ft
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.versions.group_methods import those_of
from swift_ft.torch_core.shards import describe, local
from tests.support import copies
from tests.support.machines import die, is_first_process

DEATH: dict[str, Any] = json.loads(os.environ.get("SWIFT_TEST_DEATH", "{}"))
AT = int(os.environ.get("SWIFT_TEST_AT", "-1"))
OUT = Path(os.environ["SWIFT_TEST_FOLDER"]) / "out"
COLLECTIVES = {
    "all_to_all": ("alltoall_base", "all_to_all_single"),
    "all_gather": ("_allgather_base", "all_gather_single"),
    "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
    "all_reduce": ("allreduce",),
    "gathering of keys": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "sum for keys": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
}
"""Methods of a process group, before torch 2.13 and since."""
now: dict[str, Any] = {"iteration": -1}
calls: dict[str, int] = {}
parts: dict[str, Any] = {}
session_of_script: list[Any] = []


def reach(point: str) -> None:
    """Die here, if this is the place."""
    is_here = DEATH.get("point") == point and DEATH["iteration"] == now["iteration"]
    if is_here and is_first_process() and DEATH["rank"] == dist.get_rank():
        die()


def die_around(name: str, method: str) -> None:
    original = getattr(LastingGroup, method)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        number = calls[name]
        reach(f"before {name} {number}")
        result = original(self, *args, **kwargs)
        reach(f"after {name} {number}")
        return result

    setattr(LastingGroup, method, called)


def note_session(make: Callable[..., Any]) -> Callable[..., Any]:
    def noted(state: dict[str, Any], **options: Any) -> Any:
        parts.update(state)
        session_of_script.append(made := make(state, **options))
        return made

    return noted


class Batches(gpt.Batches):
    """Each step of the examples begins with its batch."""

    def __getitem__(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        now["iteration"] = iteration
        calls.clear()
        if is_first_process() and iteration == DEATH.get("iteration") and "copied" in DEATH:
            copies.wait_for_copy(session_of_script[0], DEATH["copied"])
        if iteration == AT:
            write(f"{dist.get_world_size()}-{dist.get_rank()}.pt")
        reach("begin")
        return super().__getitem__(iteration)


def write(name: str) -> None:
    """What this worker has of each tensor, where that is in the whole, and its random state in the step."""
    found: dict[str, Any] = {"random": now.get("random")}
    for key, tensor in TrainingState(parts).named_tensors().items():
        box = describe(tensor)
        found[key] = (None if box is None else (box["shape"], box["offset"]), local(tensor).detach().clone())
    OUT.mkdir(exist_ok=True)
    torch.save(found, OUT / name)


def stepped(*_: Any) -> None:
    now["random"] = torch.get_rng_state()
    reach("after step")


def main() -> None:
    for name, methods in COLLECTIVES.items():
        for method in those_of(dist.ProcessGroup, methods):
            die_around(name, method)
    register_optimizer_step_pre_hook(lambda *_: reach("before step"))
    register_optimizer_step_post_hook(stepped)
    script: Any = swift_ft
    script.Session = note_session(swift_ft.Session)
    vars(gpt)["Batches"] = Batches
    example = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    end = dist.destroy_process_group

    def write_and_end(*args: Any) -> None:
        write(f"rank{dist.get_rank()}.pt")
        end(*args)

    vars(dist)["destroy_process_group"] = write_and_end
    example.main()


if __name__ == "__main__":
    main()
