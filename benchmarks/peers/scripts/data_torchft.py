"""Data parallel under torchft: the replicas that are left go on, and send their state to a replacement."""

from datetime import timedelta
from typing import Any

import torch
from gpt import Batches, Config, build_stage, loss_fn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from benchmarks.peers.scripts.harness import Harness, parse_arguments
from benchmarks.peers.scripts.with_torchft import PatchedDDP


def main() -> None:
    """Trains one replica."""
    args = parse_arguments(
        __doc__,
        ("--replica", {"type": int}),
        ("--replicas", {"type": int}),
        ("--fixed", {"action": "store_true", "help": "as many take part at all times, others are spares"}),
        (
            "--timeout",
            {"type": float, "help": "of the manager and the process group, in seconds; default: torchft's"},
        ),
    )
    config = Config.from_args(args)
    batches = Batches(config)
    module = build_stage(0, 1, config)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
    timeouts = {} if args.timeout is None else {"timeout": timedelta(seconds=args.timeout)}

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(**timeouts),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=args.replicas if args.fixed else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if args.fixed else WorldSizeMode.DYNAMIC,
        replica_id=f"replica_{args.replica}",
        **timeouts,
    )
    model = PatchedDDP(manager, module)
    optimizer = Optimizer(manager, inner)
    harness = Harness(args, args.replica, module)
    while (iteration := manager.current_step()) < args.iterations:
        with harness.iteration(iteration) as attempt:
            optimizer.zero_grad()  # asks for the quorum
            share = (manager.participating_rank() or 0) if args.fixed else args.replica
            x, y = (part.chunk(args.replicas)[share] for part in batches[iteration])
            loss_fn(model(x), y).backward()
            optimizer.step()
            attempt.discarded = manager.current_step() == iteration
            attempt.workers = manager.num_participants()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
