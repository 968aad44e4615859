"""Trains a GPT as a stack of layers, which move between the machines that are there.

swift-run --nnodes 2:4 --rdzv-endpoint host0:29400 examples/train_elastic.py --store /shared/elastic
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import LOOPED, ONE_STAGE, V_SHAPED, Batches, Config, argument_parser, build_layer, loss_fn
from placement import add_device_options, join
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import swift_ft


def own_batch(
    batches: Batches, iteration: int, model: swift_ft.LayerStack, counts: Sequence[int], config: Config
) -> tuple[Tensor, Tensor]:
    """The microbatches of this worker's pipeline, out of the global batch."""
    first = iteration * model.pipelines
    if not counts:
        return batches[first + model.pipeline]
    inputs, targets = zip(*(batches[first + number] for number in range(model.pipelines)), strict=True)
    skipped = sum(counts[: model.pipeline])
    own = slice(skipped * config.microbatch_size, (skipped + model.microbatches) * config.microbatch_size)
    return torch.cat(inputs)[own], torch.cat(targets)[own]


def main() -> None:
    """Trains the layers that are on one worker."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/elastic", help="a path or a URL, default: %(default)s")
    parser.add_argument("--pipelines", type=int, help="that are replicas, default: those of a plan, or 1")
    parser.add_argument("--exact", action="store_true", help="bits that no number of microbatches changes")
    parser.add_argument(
        "--costs", help="of each layer: layers.json, or 'earlier' for those of the run before, default: equal"
    )
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    args = parser.parse_args()
    config = Config.from_args(args)
    device = join(args)

    costs = args.costs
    if costs == "earlier":
        costs = swift_ft.measured_costs(args.store, config.layers + 2)
    model = swift_ft.LayerStack(
        lambda number: build_layer(number, config).to(device),
        count=config.layers + 2,
        stages_per_worker=1 if args.schedule in ONE_STAGE else 2,
        v_shaped=args.schedule in V_SHAPED,
        pipelines=args.pipelines,
        exact=args.exact,
        costs=costs,
    )
    stages = [
        PipelineStage(part, index, model.num_stages, device, group=model.group)
        for index, part in zip(model.stages, model.parts, strict=True)
    ]
    pipeline = stages if args.schedule in (*LOOPED, *V_SHAPED) else stages[0]
    microbatches = model.microbatches or config.microbatches
    schedule = get_schedule_class(args.schedule)(pipeline, microbatches, loss_fn=loss_fn)
    counts = model.counts  # before the first step: pipelines may get unlike numbers after a loss, too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(config, device)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            iteration = step.index
            x, y = own_batch(batches, iteration, model, counts, config)
            losses: list[Tensor] = []
            schedule.step(*[x] if 0 in model.stages else [], target=y, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            if losses:  # on the last stage
                print(f"iteration {iteration}: loss {sum(losses) / len(losses):.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"{args.weights_out}/rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
