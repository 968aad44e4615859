"""CPU seconds of one wrapped AdamW step, and of the undo of it; both medians. Runs under any checkout."""

from __future__ import annotations

import statistics
import time

import torch

import swift_ft

ELEMENTS, TENSORS, ROUNDS = 2**16, 64, 30


def main() -> None:
    """Print both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(TENSORS)]
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(parameters))
    steps, undos = [], []
    for _ in range(ROUNDS):
        for parameter in parameters:
            parameter.grad = torch.randn(ELEMENTS)
        began = time.process_time()
        optimizer.step()
        stepped = time.process_time()
        optimizer.undo()
        steps.append(stepped - began)
        undos.append(time.process_time() - stepped)
        optimizer.step()
        optimizer.zero_grad()
    print(statistics.median(steps), statistics.median(undos))


if __name__ == "__main__":
    main()
