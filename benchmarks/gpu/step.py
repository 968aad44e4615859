"""Failure-free steps of a GPT in bfloat16, in two stages that share a GPU: with logging, and without.

In turns:
  plain     torchrun, no session
  logged    swift-run with two machines: all messages between the stages are logged
  copied    the same, with memory checkpoints

A ratio is that of two neighbouring runs' median steps, each of the slowest stage.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Part, figure, limited, run_part
from benchmarks.lib.results import Summary, Target
from examples.commands import CommandError, finished, swift_run, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "train_large.py"
VARIANTS = ("plain", "logged", "copied")
LIMIT = 1.01
STAGES = 2
WITHIN_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of a run."""

    model: tuple[str, ...]
    iterations: int
    snapshot_every: int
    repetitions: int


LARGE = Sizes(
    (
        *("--layers=24", "--width=1152", "--heads=18", "--sequence=1024"),
        *("--microbatches=8", "--microbatch-size=4"),
    ),
    iterations=24,
    snapshot_every=8,
    repetitions=2,
)
SMALL = Sizes(
    ("--layers=4", "--width=64", "--heads=2", "--sequence=64", "--microbatches=4", "--microbatch-size=2"),
    iterations=16,
    snapshot_every=4,
    repetitions=1,
)


def measure(part: Part) -> Iterator[Target]:
    """Run the variants in turns; ratios after each repetition."""
    sizes = SMALL if part.small else LARGE
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repetition in range(sizes.repetitions):
        for turn in range(len(VARIANTS)):
            variant = VARIANTS[(repetition + turn) % len(VARIANTS)]
            with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
                seconds[variant].append(step_s(variant, sizes, part.device, Path(name)))
            yield from _figures(seconds)


def _figures(seconds: dict[str, list[float]]) -> Iterator[Target]:
    for variant, values in seconds.items():
        if values:
            yield figure(f"step, {variant}", Summary.of(values).text(" s", 4))
    for variant, name in (("logged", "logging"), ("copied", "logging and memory checkpoints")):
        pairs = [*zip(seconds[variant], seconds["plain"], strict=False)]
        if pairs:
            ratio = Summary.of([ours / plain for ours, plain in pairs])
            yield limited(f"failure-free step, {name} / plain torch", ratio, LIMIT)


def step_s(variant: str, sizes: Sizes, device: str, folder: Path) -> float:
    """The median step of the slowest stage, in seconds.

    Raises:
        CommandError: if a run fails, or logs nothing, or copies nothing.
    """
    times = folder / "times"
    options = ["--iterations", str(sizes.iterations), "--device", device, "--times", str(times), *sizes.model]
    if variant == "plain":
        command = torchrun("--nproc-per-node", str(STAGES), str(SCRIPT), "--plain", *options)
    else:
        copies = ["--snapshot-every", str(sizes.snapshot_every)] if variant == "copied" else []
        command = swift_run(
            *("--machines", str(STAGES), "--spares", "0", "--log-dir", str(folder / "logs")),
            *(str(SCRIPT), "--store", str(folder / "store"), *options, *copies),
        )
    finished(command, folder / "output.txt", within_s=WITHIN_S * (10 if device == "cpu" else 1))
    found: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(times.iterdir())]
    if len(found) != STAGES:
        raise CommandError(f"{variant}: {len(found)} of {STAGES} stages have said how long they took")
    if variant != "plain" and not all(one["messages"] for one in found):
        raise CommandError(f"{variant}: nothing was logged")
    if variant == "copied" and not all(one["in_memory"] for one in found):
        raise CommandError(f"{variant}: no memory checkpoint was complete")
    medians: list[float] = [statistics.median(one["steps"]) for one in found]
    return max(medians)


if __name__ == "__main__":
    sys.exit(run_part(__doc__, measure))
