"""Data parallel under torchft: the replicas that are left go on, and send their state to a replacement."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own classes.
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from benchmarks.peers.scripts.harness import Harness, parse_arguments


class PatchedDDP(DistributedDataParallel):  # type: ignore[misc]  # torchft has no types
    """torchft 0.2's DDP, with a hook that survives a peer's SIGKILL under gloo.

    The stock hook takes the future inside of a managed one. It is set only after `wait()`, which raises under
    gloo: torchft notes the error for the vote on the step, the future stays unset, and the hook fails with
    an assertion (for further buckets with a missing attribute). The survivor dies. Here the hook returns the
    bucket unchanged instead, and the vote discards the step, as torchft intends.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        managed: Any = work.get_future()
        future: torch.futures.Future[torch.Tensor] | None = getattr(managed, "_fut", None)
        if future is None:
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
        return future


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
