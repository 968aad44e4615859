"""The gain and the cost of helpers in a replay: a stage is lost, and 0, 1, 2 or 4 survivors help.

A pipeline of single-worker machines; the middle one is killed some iterations after the checkpoint. The
variants take turns. After each run the pure compute of the replayed iterations is measured in a separate
process:

  alone                the replacement replays alone: 1 worker computes (the paper's d = 1)
  N helpers            it and N survivors compute (d = N + 1); gradients one by one, bit-identical
  N helpers, summed    the same with mode="allreduce": each adds up its own gradients before it sends them

CPU time is read from /proc at the steps of the recovery, for all processes of the run. Elapsed time cannot
show the effect of more members than cores; the CPU time of the busiest process can. The bytes are all that
pass through the loopback interface: like elapsed time, they mean something only on an idle machine.
Medians, and the range in parentheses. A repetition takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    machine,
    of_repetitions,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.recovery.compute import pure_compute
from benchmarks.recovery.meter import Meter
from examples.commands import CommandError
from examples.disturbed import Failure, swift

WIDTH = 384
"""Of the model: far narrower ones spend more time in Python than in matrix products, as no real one does."""
LIMIT = 1.1
SUMMED = Path(__file__).parent / "scripts" / "train_summed.py"
AFTER = 3
"""Iterations after the recovery."""


@dataclass(frozen=True)
class Variant:
    """How many survivors help, and whether each adds up its gradients."""

    helpers: int
    summed: bool = False

    @property
    def members(self) -> int:
        """Workers that compute: the replacement and its helpers (the paper's d)."""
        return self.helpers + 1

    def __str__(self) -> str:
        if self.helpers == 0:
            return "alone"
        text = f"{self.helpers} helper" + "s" * (self.helpers > 1)
        return text + ", summed" * self.summed

    def apply(self, failure: Failure) -> Failure:
        """The failure, with this variant's flags and script."""
        failure = replace(failure, flags=("--helpers", str(self.helpers)))
        return replace(failure, script=SUMMED) if self.summed else failure


@dataclass(frozen=True)
class Run:
    """One recovery.

    Attributes:
        replay_s: from the first replayed iteration until the last worker is ready.
        recovery_s: from the detection until all workers were live.
        cpu_s: CPU time of all processes in the replay.
        recovery_cpu_s: in the whole recovery.
        busiest_s: of the process that used most of it in the replay: with a core for each, no replay is
            shorter.
        sent_bytes: through the loopback interface in the replay.
        pure_s: pure compute of the replayed iterations, by one process.
        pure_cpu_s: CPU time of that, by as many processes as replay, at once.
        identical: the final weights are those of the undisturbed run.
    """

    replay_s: float
    recovery_s: float
    cpu_s: float
    recovery_cpu_s: float
    busiest_s: float
    sent_bytes: float
    pure_s: float
    pure_cpu_s: float
    identical: bool


MEASURES: dict[str, tuple[str, Callable[[Run], float]]] = {
    "recovery, detected to live": (" s", lambda run: run.recovery_s),
    "replay": (" s", lambda run: run.replay_s),
    "pure compute of it, one core": (" s", lambda run: run.pure_s),
    "CPU time in the recovery": (" s", lambda run: run.recovery_cpu_s),
    "CPU time in the replay": (" s", lambda run: run.cpu_s),
    "of that the busiest process": (" s", lambda run: run.busiest_s),
    "CPU time of the pure compute, by d processes": (" s", lambda run: run.pure_cpu_s),
    "sent in the replay": (" MB", lambda run: run.sent_bytes / 1e6),
}
ON_ONE_CORE = "replay / pure compute"
IN_CPU_TIME = "CPU time in the replay / in pure compute by d processes"
WITHIN: dict[str, Callable[[Run], float]] = {
    ON_ONE_CORE: lambda run: run.replay_s / run.pure_s,
    IN_CPU_TIME: lambda run: run.cpu_s / run.pure_cpu_s,
    "CPU time in the replay / in pure compute by one": lambda run: run.cpu_s / run.pure_s,
}
BETWEEN: dict[str, Callable[[Run], float]] = {
    "recovery": lambda run: run.recovery_s,
    "replay": lambda run: run.replay_s,
    "CPU time in the replay": lambda run: run.cpu_s,
    "CPU time of the busiest process": lambda run: run.busiest_s,
}
"""Compared, within each repetition, with the run alone and with the run with the fewest helpers."""


def main() -> int:
    """Runs the variants in turns and prints the report."""
    args = parse()
    failure = scene(args)
    variants = [
        Variant(0),
        *map(Variant, args.helpers),
        *(Variant(helpers, summed=True) for helpers in args.summed),
    ]
    samples: dict[Variant, list[Run]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        reference = undisturbed(failure, Path(name) / "undisturbed")
    for repetition in range(args.repetitions):
        for turn in range(len(variants)):
            variant = variants[(repetition + turn) % len(variants)]
            samples[variant].append(run := measure(variant, failure, reference))
            print(f"# {repetition + 1}, {variant}: {run}", file=sys.stderr, flush=True)
    results = Results(samples, failure, args.microbatches)
    return finish("parallel-recovery", results.report(), results.facts(), args)


def parse() -> argparse.Namespace:
    """The command line, with its limits checked."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument(
        "--helpers",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="survivors that help, in ascending order, default: 1 2 4",
    )
    parser.add_argument(
        "--summed",
        type=int,
        nargs="*",
        default=[1],
        metavar="N",
        help='helpers in mode="allreduce", default: 1',
    )
    parser.add_argument(
        "--distance",
        type=int,
        default=10,
        help="iterations between checkpoint and kill, default: %(default)s",
    )
    parser.add_argument("--microbatches", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="one short repetition: only to see that it works"
    )
    args = parser.parse_args()
    if min([*args.helpers, *args.summed]) < 1 or args.helpers != sorted(set(args.helpers)):
        parser.error("--helpers and --summed take numbers from 1 up; the numbers of --helpers must ascend.")
    if args.distance < 2 or args.microbatches < 4:
        parser.error(
            "--distance must be at least 2 and --microbatches at least 4: the kill is in microbatch 3."
        )
    if args.quick:
        args.repetitions, args.distance, args.microbatches = 1, 4, 8
    return args


def scene(args: argparse.Namespace) -> Failure:
    """What fails, when, and of what size: two blocks a stage, and a survivor for each helper."""
    machines = max(5, 1 + max([*args.helpers, *args.summed]))
    sizes = {"layers": 2 * machines, "width": WIDTH, "microbatches": args.microbatches}
    return Failure(
        kill_iteration=args.distance,
        checkpoint_every=100 * args.distance,  # so that the one from before the first iteration is the last
        machine=machines // 2,
        machines=machines,
        options=tuple(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
    )


# ------------------------------------------------------------------------------------------------ measuring


def undisturbed(failure: Failure, folder: Path) -> dict[str, torch.Tensor]:
    """The final weights if nothing fails."""
    swift(failure, failure.kill_iteration + AFTER, folder, kill=False)
    return weights(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run, by the worker's file and by name."""
    files = sorted((folder / "weights").iterdir())
    return {f"{file.name} {name}": tensor for file in files for name, tensor in torch.load(file).items()}


def measure(variant: Variant, failure: Failure, reference: dict[str, torch.Tensor]) -> Run:
    """One failure, and its recovery with one variant.

    Raises:
        CommandError: if that was no replay with as many helpers as were asked for.
    """
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder, meter = Path(name), Meter()
        iterations = failure.kill_iteration + AFTER
        outcome = swift(variant.apply(failure), iterations, folder / "swift", show=meter)
        if not outcome.replayed or len(outcome.recoveries[0]["helpers"]) != variant.helpers:
            raise CommandError(
                f"{variant}: expected a replay with {variant.helpers} helpers, got {outcome.recoveries}"
            )
        found = weights(folder / "swift")
        pure = pure_compute(failure, failure.distance, folder)
        together = (
            pure_compute(failure, failure.distance, folder, variant.members) if variant.helpers else pure
        )
    recovery, steps = outcome.recoveries[0], outcome.timeline()
    in_replay, in_recovery = meter.spent("planned"), meter.spent("detected")
    return Run(
        replay_s=steps["replayed"] - steps["loaded"],
        recovery_s=recovery["live"] - recovery["detected"],
        cpu_s=sum(in_replay.values()),
        recovery_cpu_s=sum(in_recovery.values()),
        busiest_s=max(in_replay.values()),
        sent_bytes=meter.sent_bytes("planned"),
        pure_s=pure.wall_s,
        pure_cpu_s=together.cpu_s,
        identical=found.keys() == reference.keys()
        and all(torch.equal(tensor, reference[name]) for name, tensor in found.items()),
    )


# -------------------------------------------------------------------------------------------------- results


class Results:
    """What was measured, as a report.

    Args:
        samples: runs by variant; the first one is alone, the second has the fewest helpers.
        failure: what was recovered from.
        microbatches: of an iteration.
    """

    def __init__(self, samples: dict[Variant, list[Run]], failure: Failure, microbatches: int) -> None:
        self._samples = samples
        self._failure = failure
        self._microbatches = microbatches
        self._variants = list(samples)

    def within(self, variant: Variant, name: str) -> Summary:
        """A value of each run."""
        of = WITHIN[name] if name in WITHIN else MEASURES[name][1]
        return Summary.of([of(run) for run in self._samples[variant]])

    def between(self, variant: Variant, name: str, base: Variant) -> Summary:
        """A value against that of another variant's run in the same repetition."""
        pairs = zip(self._samples[variant], self._samples[base], strict=True)
        return Summary.of([BETWEEN[name](run) / BETWEEN[name](other) for run, other in pairs])

    def ideal(self, variant: Variant, cores: int) -> float:
        """The least part of the time alone: the largest share of microbatches, or what the cores allow."""
        largest = -(-self._microbatches // variant.members)
        return max(largest / self._microbatches, 1 / min(cores, variant.members))

    def targets(self) -> list[Target]:
        """What was asked for, against the medians; shared replays against the floor in CPU time."""
        found = []
        for variant in self._variants:
            name = IN_CPU_TIME if variant.helpers else ON_ONE_CORE
            ratio = self.within(variant, name)
            found.append(Target(f"{name}, {variant}", f"<= {LIMIT}", ratio.text(""), ratio.median <= LIMIT))
        exact = [
            run.identical for variant, runs in self._samples.items() if not variant.summed for run in runs
        ]
        same = f"{sum(exact)} of {len(exact)}"
        return [
            *found,
            Target("runs with the undisturbed run's weights, to the bit", "all", same, all(exact)),
        ]

    def report(self) -> str:
        """All results as Markdown."""
        cores = int(machine()["cores"])
        members = ["computing workers (d)", *(str(variant.members) for variant in self._variants)]
        rows = [
            [name, *(self.within(variant, name).text(unit) for variant in self._variants)]
            for name, (unit, _) in MEASURES.items()
        ]
        rows += [
            [name, *(self.within(variant, name).text("") for variant in self._variants)] for name in WITHIN
        ]
        for base in self._variants[:2]:
            rows += [
                [
                    f"{name} / with {base}",
                    *(self.between(variant, name, base).text("") for variant in self._variants),
                ]
                for name in BETWEEN
            ]
        for count, where in (
            (cores, f"{cores} cores"),
            (max(variant.members for variant in self._variants), "a core each"),
        ):
            ideals = (f"{self.ideal(variant, count):.3f}" for variant in self._variants)
            rows.append([f"least possible replay / alone, {where}", *ideals])
        head = ["", *map(str, self._variants)]
        return f"{self._intro()}\n\n{table(head, [members, *rows])}\n\n{target_table(self.targets())}"

    def _intro(self) -> str:
        failure = self._failure
        return (
            f"{failure.machines} machines with one worker each on one host train the GPT of `examples/` "
            f"(gloo, 1F1B, {self._microbatches} microbatches, two blocks {WIDTH} wide a stage, one thread a "
            f"worker); machine {failure.machine} gets SIGKILL {failure.distance} iterations after the "
            "checkpoint, a spare takes its place. The replacement and N helpers are N + 1 workers that "
            'compute, the paper\'s d. *Summed* is `mode="allreduce"`. Elapsed time cannot show the effect '
            "of more workers than cores: the CPU time of the busiest process is the lower bound of a "
            "replay with a core for each worker. CPU time is that of all processes of the run; a shared "
            "replay's lower bound is the pure compute of its microbatches by as many processes at once. "
            f"{of_repetitions(len(self._samples[self._variants[0]]))}; ratios are within each repetition."
        )

    def facts(self) -> dict[str, Any]:
        """All results, for ``--json``."""
        return {
            "variants": {
                str(variant): {
                    "members": variant.members,
                    "runs": runs,
                    "summary": {name: self.within(variant, name) for name in (*MEASURES, *WITHIN)},
                    "ratios": {
                        f"{name} / with {base}": self.between(variant, name, base)
                        for name in BETWEEN
                        for base in self._variants[:2]
                    },
                }
                for variant, runs in self._samples.items()
            },
        }


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
