"""A machine of a pipeline is killed: how long until all are live again, and the replay beside pure computing.

Three stages share a GPU, over NCCL. The time to live counts what a new process needs on a GPU: its context,
its kernels, its communicators. The pure computing of the lost stage is measured in another process,
whose kernels are loaded; those of a replacement are not, so a short replay looks worse than a long one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.part import Part, figure, limited, run_part
from benchmarks.lib.results import Summary, Target
from benchmarks.recovery.compute import pure_compute
from examples.commands import CommandError
from examples.disturbed import Failure, SwiftOutcome, swift

LIVE_S = 1.0
REPLAY = 1.15
STEPS = {
    "detected": "kill to detected",
    "joined": "kill to replacement joined",
    "reported": "kill to groups torn down, all reported",
    "loaded": "kill to checkpoint loaded, log opened",
    "live": "kill to all live, replay included",
}
MODEL = ("--layers=12", "--width=1024", "--heads=16", "--sequence=512", "--microbatches=8")


def measure(part: Part) -> Iterator[Target]:
    """One failure after the other; figures after each."""
    options = ("--device", part.device)
    if part.small:
        small = (*options, "--layers=3", "--width=64", "--heads=2", "--sequence=32", "--microbatches=4")
        failure = Failure(7, 5, machines=3, options=small, flags=("--helpers", "0"))
    else:
        large = (*options, *MODEL, "--microbatch-size=4")
        failure = Failure(18, 10, machines=3, options=large, flags=("--helpers", "0"))
    outcomes: list[tuple[dict[str, float], float]] = []
    for _ in range(1 if part.small else 2):
        with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
            outcome = swift(failure, failure.kill_iteration + 3, Path(name) / "killed")
            if not outcome.replayed:
                raise CommandError(f"the run did not recover by one replay: {outcome.recoveries}")
            replayed = sum(outcome.recoveries[0]["replayed_iterations"].values())
            pure = pure_compute(failure, replayed, Path(name)).wall_s
        outcomes.append((outcome.timeline(), pure))
        yield from _figures(outcomes)
        yield from _iteration(outcome)


def _figures(outcomes: list[tuple[dict[str, float], float]]) -> Iterator[Target]:
    steps = [timeline for timeline, _ in outcomes]
    replays = [timeline["replayed"] - timeline["loaded"] for timeline in steps]
    without = [timeline["live"] - replay for timeline, replay in zip(steps, replays, strict=True)]
    yield limited("kill to live without the replay", Summary.of(without), LIVE_S, " s")
    for name, words in STEPS.items():
        yield figure(words, Summary.of([timeline[name] for timeline in steps]).text())
    ratios = [replay / pure for replay, (_, pure) in zip(replays, outcomes, strict=True)]
    yield limited("replay / pure compute of the lost stage", Summary.of(ratios), REPLAY)


def _iteration(outcome: SwiftOutcome) -> Iterator[Target]:
    if outcome.iteration_s is not None:
        yield figure("an iteration before the kill", f"{outcome.iteration_s:.3f} s")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, measure))
