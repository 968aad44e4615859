"""The pure compute of one pipeline stage: the lower bound of its replay on the same cores.

Forward and backward of every microbatch in the order of 1F1B, scaling of the gradients, optimizer step; no
communication, no log, no random state. With several members each computes its share of the microbatches,
all at once, and one of them updates. With ``--exchange`` they are a program without any recovery: the sum of
the gradients goes from member to member, in the order of the microbatches, and the last one gives the updated
parameters to all others. Prints the seconds that it took, and those of CPU time of all members.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gpt import VOCABULARY, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, same_bits_in_each_run
from torch import Tensor, nn


def main() -> None:
    """Runs all members at once and prints the longest time and the sum of their CPU times, in seconds."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--stage", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--stages", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--members", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--exchange", action="store_true", help="members exchange gradients and parameters")
    args = parser.parse_args()
    config = Config.from_args(args)
    torch.set_num_threads(1)
    share, over = divmod(config.microbatches, args.members)
    context = multiprocessing.get_context("fork")
    start, spent = context.Barrier(args.members), context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as folder:
        for number in range(args.members):
            own = replace(config, microbatches=share + (number < over))
            context.Process(target=compute, args=(args, own, start, spent, number, folder)).start()
        walls, cpus = zip(*(spent.get() for _ in range(args.members)), strict=True)
    print(max(walls), sum(cpus))


def compute(
    args: argparse.Namespace, config: Config, start: Any, spent: Any, number: int, folder: str
) -> None:
    """One member's part of all iterations; the seconds that it took, and of CPU time, go to ``spent``."""
    updates = number == args.members - 1
    exchanges = args.exchange and args.members > 1
    if exchanges:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=args.members)
    if args.device == "cuda":
        same_bits_in_each_run()  # the kernels of the replay
    module = build_stage(args.stage, args.stages, config).to(args.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    _make_optimizer_state(module, optimizer)
    inputs, seed = _make_data(args.stage, args.stages, config)
    inputs, seed = [one.to(args.device) for one in inputs], seed.to(args.device)
    warm_up = min(config.microbatches, args.stages - args.stage) if args.members == 1 else 1

    if args.device == "cuda":  # a first iteration loads the kernels
        iterate(module, inputs, seed, warm_up)
        optimizer.zero_grad()
        torch.cuda.synchronize()
    start.wait()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(args.iterations):
        if exchanges:
            iterate_together(module, inputs, seed)
        else:
            iterate(module, inputs, seed, warm_up)
        if updates:
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(config.microbatches)
            optimizer.step()
        optimizer.zero_grad()
        if exchanges:
            give_parameters(module)
    if args.device == "cuda":
        torch.cuda.synchronize()
    spent.put((time.perf_counter() - began, time.process_time() - cpu_began))


def iterate(module: nn.Module, inputs: list[Tensor], seed: Tensor, warm_up: int) -> None:
    """One iteration's forwards and backwards; ``warm_up`` microbatches are in flight, as in 1F1B.

    Args:
        module: the stage.
        inputs: one per microbatch.
        seed: the gradient of the output; on the last stage the targets.
        warm_up: forwards before the first backward.
    """
    in_flight: deque[tuple[Tensor, Tensor]] = deque()
    for x in inputs:
        x = x.detach().requires_grad_(x.is_floating_point())
        y = module(x)
        in_flight.append((x, y))
        if len(in_flight) >= warm_up:
            backward(*in_flight.popleft(), seed)
    while in_flight:
        backward(*in_flight.popleft(), seed)


def iterate_together(module: nn.Module, inputs: list[Tensor], seed: Tensor) -> None:
    """One member's forwards and backwards, and its part of the sum of all gradients.

    The first member adds up as autograd does. The others keep each microbatch's gradients, for sums to come
    in the order of the microbatches.
    """
    parameters, rank, last = [*module.parameters()], dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        iterate(module, inputs, seed, 1)
        total = [_gradient(parameter) for parameter in parameters]
    else:
        total = [torch.empty_like(parameter) for parameter in parameters]
        arriving = [dist.irecv(tensor, rank - 1) for tensor in reversed(total)]
        terms = []
        for x in inputs:
            iterate(module, [x], seed, 1)
            terms.append([_gradient(parameter) for parameter in parameters])
            module.zero_grad()
        wait_for(arriving)
        for number, tensor in enumerate(total):
            for term in terms:
                tensor += term[number]
    if rank == last:
        for parameter, tensor in zip(parameters, total, strict=True):
            parameter.grad = tensor
    else:
        wait_for([dist.isend(tensor, rank + 1) for tensor in reversed(total)])


def give_parameters(module: nn.Module) -> None:
    """From the last member, which updates, to all others."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensors = [parameter.detach() for parameter in module.parameters()]
    if rank == last:
        wait_for([dist.isend(tensor, other) for tensor in tensors for other in range(last)])
    else:
        wait_for([dist.irecv(tensor, last) for tensor in tensors])


def wait_for(works: list[dist.Work | None]) -> None:
    """Wait for all operations."""
    for work in works:
        assert work is not None
        work.wait()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def backward(x: Tensor, y: Tensor, seed: Tensor) -> None:
    """One microbatch's backward, to the parameters and to the input."""
    if seed.is_floating_point():
        torch.autograd.backward(y, seed)
    else:
        loss_fn(y, seed).backward()
    x.grad = None


def _make_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As after loading a checkpoint: the moments exist."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _make_data(stage: int, stages: int, config: Config) -> tuple[list[Tensor], Tensor]:
    shape = (config.microbatch_size, config.sequence)
    hidden = (*shape, config.width)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    count = range(config.microbatches)
    inputs = [tokens if stage == 0 else torch.randn(hidden, generator=generator) for _ in count]
    return inputs, tokens if stage == stages - 1 else 1e-3 * torch.randn(hidden, generator=generator)


if __name__ == "__main__":
    main()
