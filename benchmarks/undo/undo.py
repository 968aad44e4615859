"""The cost of an optimizer that can be undone: time of a step and of its undo, memory, and accuracy.

Each case runs in a separate process, with five optimizers on the same gradients, in turns:
  plain       torch's optimizer, not wrapped
  foreach     the same with foreach kernels: what an undo is compared with
  wrapped     wrap_optimizer(optimizer): step, then undo
  exact       wrap_optimizer(optimizer, exact=True): step, then undo
  compiled    wrap_optimizer(optimizer, exact="compiled"): step, then undo

A ratio is that of two neighbouring runs; medians of the ratios, and the range in parentheses. Memory is the
peak of the resident set above what was there before, in another process, with nothing else in it.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import swift_ft
import swift_ft.optim
from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    of_repetitions,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.lib.usage import peak_bytes, reset_peak
from examples.commands import CommandError
from swift_ft.optim import UndoableOptimizer

LIMITS = {"step": 1.02, "undo": 1.5, "exact step": 1.6}
COMPILED_LIMITS = {"foreach": 1.6, "fused": 3.0}
"""For the compiled exact step, beside a plain one with the same kernels."""
MEGABYTE = 1e6
BUCKET_MB = 25 * 2**20 / MEGABYTE
STATE_TENSORS = {"sgd": 1, "adamw": 2}
WARM_UP = 3
STREAMS = (
    "step",
    "undo",
    "exact step",
    "exact undo",
    "compiled step",
    "compiled undo",
    "undo / plain",
    "foreach / plain",
    "exact step, CPU",
    "compiled step, CPU",
)


@dataclass(frozen=True)
class Case:
    """One model, optimizer and kernel."""

    millions: int
    optimizer: str
    kernel: str

    @property
    def name(self) -> str:
        """``20M adamw foreach``."""
        return f"{self.millions}M {self.optimizer} {self.kernel}"

    def shapes(self) -> list[tuple[int, ...]]:
        """A GPT's parameters: an embedding, and 12 tensors per layer."""
        width, layers, words = (512, 6, 2048) if self.millions <= 20 else (768, 12, 20000)
        layer = [(3 * width, width), (3 * width,), (width, width), (width,)]
        layer += [(4 * width, width), (4 * width,), (width, 4 * width), *[(width,)] * 5]
        return [(words, width), *layer * layers]

    def make(self, kernel: str, grads: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer with fresh parameters; the gradients are shared."""
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in self.shapes()]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        options: dict[str, Any] = {kernel: True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4, **options)
        return torch.optim.AdamW(params, lr=3e-4, **options)


def main() -> int:
    """Measures all cases and prints the report."""
    parser = argument_parser(__doc__, repetitions=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 100], help="millions: 20, 100")
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adamw"], choices=list(STATE_TENSORS))
    parser.add_argument("--kernels", nargs="+", default=["foreach", "fused"], choices=["foreach", "fused"])
    parser.add_argument("--child", nargs=4, help="used by this script: part, size, optimizer, kernel")
    args = parser.parse_args()
    if args.child:
        part, size, optimizer, kernel = args.child
        print(json.dumps(PARTS[part](Case(int(size), optimizer, kernel), args.repetitions)))
        return 0
    cases = [Case(s, o, k) for s in args.sizes for o in args.optimizers for k in args.kernels]
    results = []
    for case in cases:
        found = {part: in_process(part, case, args.repetitions) for part in ("timed", "memory")}
        results.append({"case": case.name, **found["timed"], **found["memory"]})
        print(f"# {case.name}: {brief(results[-1])}", file=sys.stderr, flush=True)
    accuracy = in_process("accuracy", cases[0], args.repetitions)
    targets = judge(results)
    body = report(results, accuracy, targets, args.repetitions)
    return finish("undo", body, {"results": results, "accuracy": accuracy}, args)


def in_process(part: str, case: Case, repetitions: int) -> dict[str, Any]:
    """Runs one part of one case in a separate process, which returns freed memory to the system at once."""
    command = [sys.executable, "-m", "benchmarks.undo.undo", "--repetitions", str(repetitions)]
    command += ["--child", part, str(case.millions), case.optimizer, case.kernel]
    fixed = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**18)}
    env = os.environ | (fixed if part == "memory" else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{case.name}, {part}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ------------------------------------------------------------------------------------------------- one case


def timed(case: Case, repetitions: int) -> dict[str, Any]:
    """Seconds and ratios of steps and undos, and the bytes that exact keeps."""
    grads = [torch.randn(shape) * 1e-3 for shape in case.shapes()]
    plain, foreach = case.make(case.kernel, grads), case.make("foreach", grads)
    wrapped = swift_ft.wrap_optimizer(case.make(case.kernel, grads))
    exact = swift_ft.wrap_optimizer(case.make(case.kernel, grads), exact=True)
    compiled = swift_ft.wrap_optimizer(case.make(case.kernel, grads), exact="compiled")
    for _ in range(WARM_UP):
        for optimizer in (plain, foreach, wrapped, exact, compiled):
            optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "foreach")}
    ratios: dict[str, list[float]] = {name: [] for name in STREAMS}
    turns: list[Callable[[], dict[str, float]]] = [
        lambda: times_of("plain", plain.step),
        lambda: {"foreach": seconds_of(foreach.step)},
        lambda: {"step": seconds_of(wrapped.step), "undo": seconds_of(wrapped.undo)},
        lambda: times_of("exact step", exact.step) | {"exact undo": seconds_of(exact.undo)},
        lambda: times_of("compiled step", compiled.step) | {"compiled undo": seconds_of(compiled.undo)},
    ]
    for repetition in range(repetitions):
        found: dict[str, float] = {}
        for turn in range(len(turns)):
            found |= turns[(repetition + turn) % len(turns)]()
        for name in seconds:
            seconds[name].append(found[name])
        ratios["step"].append(found["step"] / found["plain"])
        ratios["undo"].append(found["undo"] / found["foreach"])
        for kind in ("exact", "compiled"):
            for what in (f"{kind} step", f"{kind} step, CPU"):
                ratios[what].append(found[what] / found[what.replace(f"{kind} step", "plain")])
            ratios[f"{kind} undo"].append(found[f"{kind} undo"] / found["foreach"])
        ratios["undo / plain"].append(found["undo"] / found["plain"])
        ratios["foreach / plain"].append(found["foreach"] / found["plain"])
    exact.step()
    elements = sum(grad.numel() for grad in grads)
    return {
        "elements": elements,
        "seconds": {name: Summary.of(values).to_dict() for name, values in seconds.items()},
        "ratios": {name: Summary.of(values).to_dict() for name, values in ratios.items()},
        "exact_bytes": exact.undo_memory_bytes() / elements / (1 + STATE_TENSORS[case.optimizer]),
    }


def times_of(name: str, work: Callable[[], object]) -> dict[str, float]:
    """Elapsed seconds of one call, and its CPU time."""
    start = time.process_time()
    elapsed = seconds_of(work)
    return {name: elapsed, f"{name}, CPU": time.process_time() - start}


def seconds_of(work: Callable[[], object]) -> float:
    """Elapsed seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memory(case: Case, repetitions: int) -> dict[str, Any]:
    """Peaks in megabytes above the resident set of parameters, gradients and state."""
    grads = [torch.randn(shape) * 1e-3 for shape in case.shapes()]
    plain = case.make(case.kernel, grads)
    for _ in range(WARM_UP):
        plain.step()
    peaks = {"plain step": peak_mb(plain.step)}
    wrapped = swift_ft.wrap_optimizer(plain)
    wrapped.step()
    wrapped.undo()
    peaks["wrapped step"] = peak_mb(wrapped.step)
    peaks["undo"] = peak_mb(wrapped.undo)
    return {"peak_mb": peaks}


def peak_mb(work: Callable[[], object]) -> float:
    """How far the resident set rose above its size before, in megabytes (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before hides what is allocated now
    reset_peak(os.getpid())
    before = peak_bytes(os.getpid())
    work()
    return max(0.0, (peak_bytes(os.getpid()) - before) / MEGABYTE)


# ------------------------------------------------------------------------------------------------- accuracy


def accuracy(case: Case, repetitions: int) -> dict[str, Any]:
    """Worst error in ulps and the share of elements restored to the bit, float32, per optimizer."""
    kinds = (*TORCHS, swift_ft.optim.Lamb)
    return {kind.__name__: accuracy_of(kind) for kind in kinds}


TORCHS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Muon,
    torch.optim.Adafactor,
)


def accuracy_of(kind: type[torch.optim.Optimizer], steps: int = 20) -> dict[str, dict[str, float]]:
    """Worst error in ulps and the share of exact elements, for the parameter and each tensor of the state."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(300, 300) * 0.05)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizer: UndoableOptimizer = swift_ft.wrap_optimizer(make([param], **options))
    worst: dict[str, float] = {}
    same: dict[str, list[float]] = {}
    drift = torch.randn_like(param) * 1e-3
    for _ in range(steps):
        param.grad = drift + torch.randn_like(param) * 1e-3
        before = tensors_of(optimizer, param)
        optimizer.step()
        after = tensors_of(optimizer, param)
        optimizer.undo()
        for name, now in tensors_of(optimizer, param).items():
            size = torch.maximum(before[name].abs(), after[name].abs()).double().clamp_min(1e-37)
            error = (now.double() - before[name].double()).abs() / (size * torch.finfo(now.dtype).eps)
            worst[name] = max(worst.get(name, 0.0), float(error.max()))
            same.setdefault(name, []).append(float((now == before[name]).double().mean()))
        optimizer.step()
    return {name: {"ulps": worst[name], "exact": statistics.mean(same[name])} for name in worst}


def tensors_of(optimizer: UndoableOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of the parameter and of the tensors in its state, by name."""
    state = {k: v for k, v in optimizer.state.get(param, {}).items() if v.numel() > 1}
    return {name: value.detach().clone() for name, value in {"param": param, **state}.items()}


PARTS: dict[str, Callable[[Case, int], dict[str, Any]]] = {
    "timed": timed,
    "memory": memory,
    "accuracy": accuracy,
}


# --------------------------------------------------------------------------------------------------- report


def judge(results: Sequence[dict[str, Any]]) -> list[Target]:
    """What was asked for, case by case."""
    targets = []
    for result in results:
        limits = LIMITS | {"compiled step": COMPILED_LIMITS[result["case"].split()[-1]]}
        for name, limit in limits.items():
            ratio = Summary(**result["ratios"][name])
            what = "undo / foreach step" if name == "undo" else f"{name} / plain step"
            met = ratio.median <= limit
            targets.append(Target(f"{result['case']}: {what}", f"<= {limit}", ratio.text("x", 3), met))
        more = more_mb(result)
        targets.append(
            Target(
                f"{result['case']}: more memory at the peak", "<= 25 MiB", f"{more:.1f} MB", more <= BUCKET_MB
            )
        )
        held = result["exact_bytes"]
        targets.append(
            Target(f"{result['case']}: exact, per element and tensor", "<= 1 B", f"{held:.4f} B", held <= 1)
        )
    return targets


def more_mb(result: dict[str, Any]) -> float:
    """The higher of the peaks of wrapped step and undo, above the plain step's."""
    peaks = result["peak_mb"]
    return float(max(0.0, max(peaks["wrapped step"], peaks["undo"]) - peaks["plain step"]))


def brief(result: dict[str, Any]) -> str:
    """One line for the progress output."""
    ratios = ", ".join(f"{name} {values['median']:.3f}" for name, values in result["ratios"].items())
    return f"{ratios}, {more_mb(result):.1f} MB more, exact {result['exact_bytes']:.4f} B"


def report(
    results: Sequence[dict[str, Any]],
    accuracy: dict[str, dict[str, dict[str, float]]],
    targets: Sequence[Target],
    repetitions: int,
) -> str:
    """All results as Markdown."""
    head = ["", "plain step", "foreach step", *(f"{name} (x)" for name in STREAMS)]
    rows = [
        [
            result["case"],
            *(Summary(**result["seconds"][name]).text() for name in ("plain", "foreach")),
            *(Summary(**result["ratios"][name]).text("", 2) for name in STREAMS),
        ]
        for result in results
    ]
    errors = [
        [name, ", ".join(f"{part} {v['ulps']:.1f} ({100 * v['exact']:.1f} %)" for part, v in parts.items())]
        for name, parts in accuracy.items()
    ]
    return "\n\n".join(
        [
            f"{of_repetitions(repetitions)}. Steps as multiples of the plain step, "
            f"undos of the foreach step; {torch.get_num_threads()} threads.",
            table(head, rows),
            "Error of an undo without `exact`, float32, 90,000 parameters, 20 steps: worst in ulps of the "
            "larger of the values before and after (share of elements restored to the bit).",
            table(["optimizer", "error"], errors),
            target_table(targets),
        ]
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
