"""Trains a small GPT that FSDP2 has sharded within replicas (HSDP), and dies where it is told to.

SWIFT_TEST_DEATH: as JSON, the ranks that die, the iteration, the point in it, and the ranks whose update must
be done before.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import swift_ft
from swift_ft.undo import copies
from tests.support.machines import is_first_process
from tests.support.script import script_parser
from tests.support.waiting import wait_until

DEATH: dict[str, Any] = json.loads(os.environ.get("SWIFT_TEST_DEATH", "{}"))
now = {"iteration": -1}


def die_at(point: str) -> None:
    """Die there, if this is the first worker of a rank that is to die."""
    due = DEATH.get("point") == point and DEATH["iteration"] == now["iteration"]
    if due and dist.get_rank() in DEATH["ranks"] and is_first_process():
        files = [updated(rank, now["iteration"]) for rank in DEATH["after"]]
        wait_until(lambda: all(file.exists() for file in files), f"not all of {files} are there")
        os.kill(os.getpid(), signal.SIGKILL)


def updated(rank: int, iteration: int) -> Path:
    """A file that tells of a rank's update."""
    return Path(os.environ["SWIFT_TEST_FOLDER"]) / f"updated-{rank}-{iteration}"


BEFORE = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""The names of collectives before torch 2.13."""


def die_around(module: Any, name: str) -> None:
    """Points before and after each call of a collective in an iteration: ``reduce_scatter_single 3``."""
    of_torch = name if hasattr(module, name) else BEFORE[name]
    original, calls = getattr(module, of_torch), {"iteration": -1, "number": 0}

    def called(*args: Any, **kwargs: Any) -> Any:
        if calls["iteration"] != now["iteration"]:
            calls.update(iteration=now["iteration"], number=0)
        calls["number"] += 1
        die_at(f"before {name} {calls['number']}")
        result = original(*args, **kwargs)
        die_at(f"after {name} {calls['number']}")
        return result

    setattr(module, of_torch, called)


def build(args: argparse.Namespace, config: Config) -> torch.nn.Module:
    """The model, each block sharded by itself."""
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh(
        "cpu", (args.replicas, dist.get_world_size() // args.replicas), mesh_dim_names=names
    )
    torch.manual_seed(3)
    model = build_stage(0, 1, config)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": args.reshard == "yes",
        "mp_policy": mixed if args.bf16 else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if args.offload else OffloadPolicy(),
    }
    blocks = [m for m in model.modules() if type(m).__name__ == "Block"]
    assert blocks
    for number, block in enumerate(blocks):
        fully_shard(block, **options)
        block.register_forward_pre_hook(lambda *_, n=number: die_at(f"forward {n}"))
        block.register_full_backward_pre_hook(lambda *_, n=number: die_at(f"backward {n}"))
    fully_shard(model, **options)
    return model


def main() -> None:
    """Trains one worker's shards."""
    parser = script_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--reshard", default="yes")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--plain-optimizer", action="store_true")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--large", action="store_true", help="nothing counts as small enough to be copied")
    args = parser.parse_args()
    if args.large:
        copies.COPIED_BYTES = 0
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        die_around(dist, name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(args, config)
    momentum = {"momentum": 0.9} if args.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-3, foreach=True, **momentum)
    if not args.plain_optimizer:
        optimizer = swift_ft.wrap_optimizer(optimizer, exact=True)
    optimizer.register_step_pre_hook(lambda *_: die_at("before step"))
    optimizer.register_step_post_hook(lambda *_: die_at("after step"))
    optimizer.register_step_post_hook(lambda *_: updated(rank, now["iteration"]).touch())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.iterations)
    batches = Batches(config)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_fsdp(model)
    for step in session.steps(args.iterations):
        with step:
            now["iteration"] = step.index
            x, y = (part.chunk(world_size)[rank] for part in batches[step.index])
            loss = loss_fn(model(x), y)
            die_at("between the passes")
            loss.backward()
            if not args.no_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    shards = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    for index, fields in optimizer.state_dict()["state"].items():
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                shards[f"{index}.{name}"] = value.to_local() if hasattr(value, "to_local") else value
    torch.save({name: tensor.clone() for name, tensor in shards.items()}, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
