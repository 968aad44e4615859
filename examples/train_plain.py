"""Trains a GPT with pipeline parallelism under torchrun, and survives failures with checkpoints.

torchrun --nproc-per-node 4 --max-restarts 3 examples/train_plain.py --checkpoint-dir runs/plain

When a worker dies, torchrun stops all others and restarts the whole job. All workers load the last checkpoint
and repeat every iteration since. The benchmarks compare swift_ft with this.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Batches, Config, argument_parser, build_stage, loss_fn, stages_of
from instrument import Trace, kill_in_forward
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

# One flat key per parameter: in a nested state, the stages' lists of parameter groups would share one key.
STATE_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(
    directory: Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Saves the state after ``iteration``; DCP commits it by writing ``.metadata`` last."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=STATE_OPTIONS)
    state = {"model": model_state, "optimizer": optimizer_state, "iteration": iteration}
    dcp.save(state, checkpoint_id=directory / f"iteration-{iteration:08d}")


def load_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last committed checkpoint, if there is one. Returns the iteration to continue with."""
    committed = sorted(metadata.parent for metadata in directory.glob("iteration-*/.metadata"))
    if not committed:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer, options=STATE_OPTIONS)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "iteration": -1}
    dcp.load(state, checkpoint_id=committed[-1])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=STATE_OPTIONS,
    )
    return int(state["iteration"]) + 1


def main() -> None:
    """Trains one worker's stages."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path("runs/plain"), help="default: %(default)s"
    )
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    benchmark = parser.add_argument_group("for benchmarks")
    benchmark.add_argument("--kill-rank", type=int, help="this rank kills itself, once,")
    benchmark.add_argument("--kill-iteration", type=int, help="in the middle of this iteration's forward,")
    benchmark.add_argument("--kill-marker", type=Path, help="unless this file exists")
    benchmark.add_argument("--trace", metavar="FILE", help="append what happens when, as JSON lines")
    args = parser.parse_args()
    if args.kill_rank is not None and args.kill_marker is None:
        parser.error("--kill-rank needs --kill-marker, or every restart would be killed again")
    config = Config.from_args(args)

    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trace = Trace(args.trace, rank)
    trace("joined")

    indices, num_stages = stages_of(args.schedule, rank, world_size)
    modules = {index: build_stage(index, num_stages, config).to(device) for index in indices}
    stages = [PipelineStage(part, index, num_stages, device) for index, part in modules.items()]
    model = nn.ModuleList(modules.values())
    pipeline = stages if len(stages) > 1 else stages[0]
    schedule = get_schedule_class(args.schedule)(pipeline, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(config, device)

    first_iteration = load_checkpoint(args.checkpoint_dir, model, optimizer)
    trace("loaded", first_iteration)

    for iteration in range(first_iteration, args.iterations):
        if (rank, iteration) == (args.kill_rank, args.kill_iteration):
            kill_in_forward(modules[rank], iteration, 3, args.kill_marker, trace)
        x, y = batches[iteration]
        losses: list[Tensor] = []
        schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        trace("finished", iteration)
        if losses:  # on the last stage
            print(f"iteration {iteration}: loss {sum(losses) / len(losses):.3f}", flush=True)
        if (iteration + 1) % args.checkpoint_every == 0:
            save_checkpoint(args.checkpoint_dir, iteration, model, optimizer)
            trace("checkpoint", iteration)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
