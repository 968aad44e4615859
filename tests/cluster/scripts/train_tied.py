"""The example training, with an embedding on the first stage that is also the head of the last one."""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.script import script_parser


def build(index: int, num_stages: int, config: Config) -> nn.Module:
    stage = build_stage(index, num_stages, config)
    if index == num_stages - 1:
        first = build_stage(0, num_stages, config)
        with torch.no_grad():
            tied_weight(stage).copy_(tied_weight(first))
    return stage


def tied_weight(stage: nn.Module) -> nn.Parameter:
    """The first stage's embedding, the last stage's output layer."""
    names = dict(stage.named_parameters())
    return names["embedding.token.weight" if "embedding.token.weight" in names else "head.logits.weight"]


def main() -> None:
    args = script_parser(__doc__).parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module = build(rank, last + 1, config)
    stage = PipelineStage(module, rank, last + 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batches = Batches(config)
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_pipeline(schedule, build=lambda index: build(index, last + 1, config))
    if rank in (0, last):
        session.tie(tied_weight(module), (0, last))
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            session.sum_tied_gradients()
            optimizer.step()
            optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
