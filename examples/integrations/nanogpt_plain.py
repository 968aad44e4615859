"""Trains a GPT in nanoGPT's loop, with DDP: random windows of a mapped file, accumulation, a best loss.

torchrun --nproc-per-node 2 examples/integrations/nanogpt_plain.py
"""

import math
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Config, build_stage, loss_fn
from nanogpt_parts import BLOCK, argument_parser, cosine_rate, random_windows, write_tokens
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Trains one replica."""
    parser = argument_parser(__doc__)
    args = parser.parse_args()
    out = Path(args.out)
    write_tokens(out / "train.bin")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    config = Config(layers=2, width=32, heads=2, sequence=BLOCK)
    model = DistributedDataParallel(build_stage(0, 1, config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    best_loss = math.inf
    get_batch, rate_of = partial(random_windows, out / "train.bin"), partial(cosine_rate, args.iterations)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        batches = [get_batch("val") for _ in range(4)]
        losses = [loss_fn(model.module(x), y).item() for x, y in batches]
        model.train()
        return sum(losses) / len(losses)

    def keep_best(loss: float) -> None:
        nonlocal best_loss
        if loss < best_loss:
            best_loss = loss
            if rank == 0:
                checkpoint = {"model": model.module.state_dict(), "best_loss": best_loss}
                torch.save(checkpoint, out / "best.pt")

    x, y = get_batch("train")  # the first one
    iteration = 0
    while iteration < args.iterations:
        if iteration and iteration % args.eval_interval == 0:
            keep_best(estimate_loss())
        for group in optimizer.param_groups:
            group["lr"] = rate_of(iteration)
        for part in range(args.accumulate):
            model.require_backward_grad_sync = part == args.accumulate - 1
            loss = loss_fn(model(x), y) / args.accumulate
            x, y = get_batch("train")  # the next one, while the backward pass runs
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iteration += 1
    print(f"[worker {rank}] the best loss is {best_loss:.3f}", flush=True)

    torch.save({"model": model.module.state_dict(), "best_loss": best_loss}, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
