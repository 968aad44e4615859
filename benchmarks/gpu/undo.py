"""AdamW with fused kernels: the undo of a step, and a step that can be undone exactly, beside a plain step.

A plain optimizer and a wrapped one take steps with the same gradients, in turns; medians of the ratios of
neighbours. Times end when the device has done its work.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import swift_ft
from benchmarks.gpu.part import Part, figure, limited, run_part
from benchmarks.lib.results import Summary, Target

WIDTH = 4096
UNDO, EXACT = 1.5, 1.5
"""What is asked at most; the aims are 1.0 and 1.1."""
WARM_UP = 2


def measure(part: Part) -> Iterator[Target]:
    """Both wrappers, one after the other."""
    tensors, width = (2, 128) if part.small else (60, WIDTH)
    device = torch.device(part.device)
    grads = [torch.randn(width, width, device=device) * 1e-3 for _ in range(tensors)]
    yield figure("parameters of the optimizer", f"{tensors * width * width / 1e6:.3g} million in float32")
    for exact in (False, True):
        yield from _compared(grads, exact, 3 if part.small else 10)
        gc.collect()
        if part.device == "cuda":
            torch.cuda.empty_cache()


def _compared(grads: list[torch.Tensor], exact: bool, repetitions: int) -> Iterator[Target]:
    plain = _adamw(grads)
    wrapped = swift_ft.wrap_optimizer(_adamw(grads), exact=exact)
    kind = "exact " if exact else ""
    plains: list[float] = []
    steps: list[float] = []
    undos: list[float] = []
    for repetition in range(WARM_UP + repetitions):
        times = [_seconds(action, grads) for action in (plain.step, wrapped.step, wrapped.undo)]
        wrapped.step()
        if repetition >= WARM_UP:
            for values, seconds in zip((plains, steps, undos), times, strict=True):
                values.append(seconds)
    yield figure("step of fused AdamW, plain", Summary.of([1e3 * value for value in plains]).text(" ms"))
    step = Summary.of([ours / theirs for ours, theirs in zip(steps, plains, strict=True)])
    undo = Summary.of([ours / theirs for ours, theirs in zip(undos, plains, strict=True)])
    if exact:
        yield limited("exact step / plain step", step, EXACT)
        yield figure("undo of an exact step / plain step", undo.text(""))
    else:
        yield figure("step of a wrapped optimizer / plain step", step.text(""))
        yield limited("undo / plain step", undo, UNDO)
    if grads[0].is_cuda:
        taken = torch.cuda.max_memory_allocated() / 1e9
        yield figure(f"most memory of both optimizers, {kind}step and undo", f"{taken:.1f} GB")
        torch.cuda.reset_peak_memory_stats()


def _adamw(grads: list[torch.Tensor]) -> torch.optim.AdamW:
    params = [torch.nn.Parameter(torch.full_like(grad, 0.02)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return torch.optim.AdamW(params, lr=3e-4, fused=True)


def _seconds(action: Callable[[], Any], grads: list[torch.Tensor]) -> float:
    _settle(grads)
    began = time.perf_counter()
    action()
    _settle(grads)
    return time.perf_counter() - began


def _settle(grads: list[torch.Tensor]) -> None:
    if grads[0].is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(run_part(__doc__, measure))
