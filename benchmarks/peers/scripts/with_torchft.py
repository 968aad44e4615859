"""DDP under torchft: a lost worker's replica continues alone, and sends its state to the replacement."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own classes.
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers.scripts.work import Trace, Work, parse_arguments


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
    """Trains one replica until its run is ended from outside, and marks the steps in the trace."""
    args = parse_arguments(
        __doc__,
        ("--replica", {"type": int, "required": True}),
        ("--stock-hook", {"action": "store_true", "help": "torchft's own, which does not survive a SIGKILL"}),
        ("--timeout", {"type": float, "help": "of everything that has one, in seconds; default: torchft's"}),
    )
    timeout = None if args.timeout is None else timedelta(seconds=args.timeout)
    timeouts = (
        {} if timeout is None else dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), timeout)
    )
    work = Work(args, args.replica, Trace(args.trace, args.replica))
    manager = Manager(
        pg=ProcessGroupGloo() if timeout is None else ProcessGroupGloo(timeout),
        load_state_dict=lambda state: load(work, state),
        state_dict=lambda: {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{args.replica}",
        **timeouts,
    )
    work.trace("joined")
    model = (DistributedDataParallel if args.stock_hook else PatchedDDP)(manager, work.model)
    optimizer = Optimizer(manager, work.optimizer)

    def committed(*_: Any) -> None:
        # In the step in which a replacement gets the state (it is `healed`), its own gradients do not count.
        facts = {"workers": manager.num_participants(), "healed": not manager.is_participating()}
        work.trace.end(manager.current_step() - 1, **facts)

    work.optimizer.register_step_post_hook(committed)  # not called for a discarded step
    while (iteration := manager.current_step()) < args.iterations:
        work.trace("begin", iteration=iteration)
        work.kill_when_due(iteration)
        optimizer.zero_grad()
        work.loss(model, iteration).backward()
        optimizer.step()
    manager.shutdown(wait=False)


def load(work: Work, state: dict[str, Any]) -> None:
    """What torchft calls in a replacement."""
    work.model.load_state_dict(state["model"])
    work.optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    main()
