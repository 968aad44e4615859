"""A pipeline under swift-run: a lost worker's stage is replayed from the log."""

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's stage."""
    args = parse_arguments(__doc__, ("--store", {}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    config = Config.from_args(args)
    batches = Batches(config)
    model = build_stage(rank, workers, config)
    stage = PipelineStage(model, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, workers, config))
    for step in session.steps(args.iterations):
        with step, harness.iteration(step.index):
            x, y = batches[step.index]
            schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
