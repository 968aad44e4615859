"""Trains the GPT of the examples in several stages in one process, and saves the tensors between them."""

from __future__ import annotations

from collections import deque

import torch
from gpt import Batches, Config, argument_parser, build_stage, loss_fn

Sent = tuple[int, int, int, torch.Tensor]
"""Iteration, microbatch, the stage before the boundary, and the tensor."""


def main() -> None:
    """Writes ``{"forward": [...], "backward": [...]}`` with the last messages of each direction."""
    parser = argument_parser(__doc__)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--dtype", required=True, help="the model's, as torch names it")
    parser.add_argument("--messages", type=int, required=True, help="to keep, of each direction")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    config = Config.from_args(args)
    torch.set_num_threads(1)
    stages = [build_stage(i, args.stages, config).to(getattr(torch, args.dtype)) for i in range(args.stages)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer, batches = torch.optim.AdamW(parameters, lr=3e-4), Batches(config)
    forward: deque[Sent] = deque(maxlen=args.messages)
    backward: deque[Sent] = deque(maxlen=args.messages)
    for iteration in range(args.iterations):
        x, y = batches[iteration]
        for microbatch, (inputs, targets) in enumerate(
            zip(x.chunk(config.microbatches), y.chunk(config.microbatches), strict=True)
        ):
            sent = []
            value = inputs
            for stage in stages[:-1]:
                value = stage(value)
                value.retain_grad()
                sent.append(value)
            loss_fn(stages[-1](value).float(), targets).div(config.microbatches).backward()
            for stage_index, tensor in enumerate(sent):
                assert tensor.grad is not None
                forward.append((iteration, microbatch, stage_index, tensor.detach()))
                backward.append((iteration, microbatch, stage_index, tensor.grad))
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"forward": list(forward), "backward": list(backward)}, args.out)


if __name__ == "__main__":
    main()
