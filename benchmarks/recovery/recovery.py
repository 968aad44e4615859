"""How long a recovery takes, step by step, and against torchrun with DCP checkpoints.

The same failure at several distances from the last checkpoint, in turns: under swift-run with a replay alone,
whose floor is known, under swift-run as it comes (survivors help), and under torchrun. After each recovery
the pure compute of the replayed stage is measured in separate processes: by one, and by as many as have
computed, which exchange gradients and parameters over gloo and know of no recovery. CPU time is read from
/proc: with a core for each process, no recovery is shorter than that of the busiest one.
Medians, and the range in parentheses. A repetition takes about ten minutes on two cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

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
from benchmarks.recovery.breakdown import measured
from benchmarks.recovery.compute import pure_compute
from benchmarks.recovery.meter import Meter
from examples.commands import CommandError
from examples.disturbed import Failure, SwiftOutcome, plain, swift
from swift_ft.logging.options import LogBudget
from swift_ft.planning.simulation.inputs import MeasuredRecovery
from swift_ft.undo.exact import BUCKET_BYTES

STEPS = {
    "detected": "kill to detected",
    "joined": "to replacement joined",
    "reported": "to groups torn down, all reported",
    "loaded": "to checkpoint loaded, log opened",
    "replayed": "to replayed (ready)",
    "live": "to all live, interrupted iteration begins",
    "done": "to first live iteration done",
}
RESULTS = {
    "pure_s": "pure compute of the replayed iterations",
    "replay_s": "replay",
    "replay_ratio": "replay / pure compute",
    "without_replay_s": "kill to live without the replay",
    "torchrun_s": "torchrun + DCP, until in the same iteration again",
    "ratio": "torchrun + DCP / swift_ft",
}
HELPED = {
    "helped_live_s": "with helpers: kill to all live",
    "helped_replay_s": "replay",
    "helped_without_replay_s": "kill to live without the replay",
    "helped_cpu_s": "CPU time of all processes in the recovery",
    "helped_busiest_s": "of the busiest one",
    "helped_next_s": "of the next ones, each",
    "helped_growth_mb": "most memory of a survivor, above its peak in training",
    "helped_bare_s": "the same computing by as many processes without any recovery",
    "helped_bare_ratio": "that / replay",
    "helped_spread_ratio": "pure compute, spread over the cores / replay",
    "helped_ratio": "torchrun + DCP / swift_ft",
}
ROOM_MB = (BUCKET_BYTES + LogBudget().memory_bytes) / 1e6
CORES = len(os.sched_getaffinity(0))


def main() -> int:
    """Measures every distance and prints the report."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument(
        "--distances",
        type=int,
        nargs="+",
        default=[1, 25, 49],
        metavar="N",
        help="completed iterations between the last checkpoint and the kill, default: 1 25 49",
    )
    args = parser.parse_args()
    samples: dict[int, list[dict[str, float]]] = {distance: [] for distance in args.distances}
    recoveries: list[MeasuredRecovery] = []
    for repetition in range(args.repetitions):
        for distance in args.distances:
            values, both = measure(distance)
            samples[distance].append(values)
            recoveries += both
            print(f"# {repetition + 1}, {distance}: {samples[distance][-1]}", file=sys.stderr, flush=True)
    summaries = {
        distance: {name: Summary.of([sample[name] for sample in some]) for name in some[0]}
        for distance, some in samples.items()
    }
    targets = judge(summaries)
    body = report(summaries, targets, args.repetitions)
    distances = {
        distance: {"samples": samples[distance], "summary": values} for distance, values in summaries.items()
    }
    # `swift-sim --calibrate` reads the recoveries.
    return finish("recovery", body, {"distances": distances, "recoveries": recoveries}, args)


def measure(distance: int) -> tuple[dict[str, float], list[MeasuredRecovery]]:
    """One failure at a distance from the last checkpoint, under swift-run and under torchrun.

    Returns:
        Seconds after the kill for each of ``STEPS``, and the values of ``RESULTS`` and ``HELPED``; the
        recovery alone and torchrun's in the format of ``swift-sim --calibrate``.
    """
    kill = max(2 * distance + 1, 4)
    failure = Failure(kill_iteration=kill, checkpoint_every=kill - distance)
    assert failure.distance == distance
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder = Path(name)
        alone = replayed_run(replace(failure, flags=("--helpers", "0")), folder / "alone")
        replayed = sum(alone.recoveries[0]["replayed_iterations"].values())
        pure_s = pure_compute(failure, replayed, folder).wall_s
        torchrun = plain(failure, folder / "torchrun")
        meter = Meter()
        helped = replayed_run(failure, folder / "helped", meter)
        members = 1 + len(helped.recoveries[0]["helpers"])
        bare_s = pure_compute(failure, replayed, folder, members, exchange=True).wall_s
    ordinary = torchrun.timeline()
    steps = alone.timeline()
    replay_s = steps["replayed"] - steps["loaded"]
    recovery, iteration_s = alone.recoveries[0], alone.iteration_s
    assert alone.killed is not None
    assert alone.loaded is not None
    assert iteration_s is not None
    ours = measured(recovery, alone.killed, alone.loaded, failure.checkpoint_every, iteration_s)
    theirs = MeasuredRecovery(
        strategy="global_checkpoint",
        startup_s=ordinary["restarted"],
        restore_s=ordinary["loaded"] - ordinary["restarted"],
        replay_s=ordinary["back"] - ordinary["loaded"],
        replayed_iterations=torchrun.iterations_lost,
        iteration_s=iteration_s,
    )
    values = {
        **steps,
        "pure_s": pure_s,
        "replay_s": replay_s,
        "replay_ratio": replay_s / pure_s,
        "without_replay_s": steps["live"] - replay_s,
        "torchrun_s": ordinary["back"],
        "ratio": ordinary["back"] / steps["live"],
        **_helped(helped, meter, pure_s, bare_s, ordinary["back"]),
    }
    return values, [ours, theirs]


def replayed_run(failure: Failure, folder: Path, show: Meter | None = None) -> SwiftOutcome:
    """The failure under swift-run. Its recovery's path goes to stderr.

    Raises:
        CommandError: if the run does not end well, or recovers in another way than by one replay.
    """
    outcome = swift(failure, failure.kill_iteration + 4, folder, show=show)
    if not outcome.replayed or outcome.iteration_s is None:
        raise CommandError(f"the recovery was no replay: {outcome.recoveries}")
    # So that one that is unlike the others explains itself.
    print(f"# {folder.name}: {outcome.recoveries[0]['path']}", file=sys.stderr, flush=True)
    return outcome


def _helped(
    outcome: SwiftOutcome, meter: Meter, pure_s: float, bare_s: float, torchrun_s: float
) -> dict[str, float]:
    """The values of ``HELPED``."""
    helpers = len(outcome.recoveries[0]["helpers"])
    if not helpers:
        raise CommandError(f"nobody helped: {outcome.recoveries}")
    steps = outcome.timeline()
    replay_s = steps["replayed"] - steps["loaded"]
    spent = sorted(meter.spent("detected").values(), reverse=True)
    return {
        "helped_live_s": steps["live"],
        "helped_replay_s": replay_s,
        "helped_without_replay_s": steps["live"] - replay_s,
        "helped_cpu_s": sum(spent),
        "helped_busiest_s": spent[0],
        "helped_next_s": sum(spent[1 : 1 + helpers]) / helpers,
        "helped_growth_mb": meter.survivors_growth_bytes() / 1e6,
        "helped_bare_s": bare_s,
        "helped_bare_ratio": bare_s / replay_s,
        "helped_spread_ratio": pure_s / min(CORES, 1 + helpers) / replay_s,
        "helped_ratio": torchrun_s / steps["live"],
    }


def judge(summaries: dict[int, dict[str, Summary]]) -> list[Target]:
    """What was asked for, against the medians."""
    targets = []
    for distance, values in summaries.items():
        at = f", {distance} iterations after the checkpoint"
        rest, replay, reported = (values[name] for name in ("without_replay_s", "replay_ratio", "reported"))
        ratio, spread = values["helped_ratio"], values["helped_spread_ratio"]
        grown = values["helped_growth_mb"]
        targets += [
            Target(f"kill to live, without the replay{at}", "<= 0.2 s", rest.text(), rest.median <= 0.2),
            Target(f"kill to all reported{at}", "<= 0.08 s", reported.text(), reported.median <= 0.08),
            Target(f"replay / pure compute{at}", "<= 1.15", replay.text(""), replay.median <= 1.15),
            Target(f"faster than torchrun + DCP, with helpers{at}", ">= 5", *_at_least(ratio, 5.0)),
            Target(
                f"a survivor's memory{at}", f"<= {ROOM_MB:.0f} MB", grown.text(" MB"), grown.median <= ROOM_MB
            ),
            Target(f"of what the cores allow, with helpers{at}", ">= 0.85", *_at_least(spread, 0.85)),
        ]
    return targets


def _unit(name: str) -> str:
    return "" if name.endswith("ratio") else " MB" if name.endswith("mb") else " s"


def _at_least(found: Summary, least: float) -> tuple[str, bool]:
    return found.text("", 2), found.median >= least


def report(summaries: dict[int, dict[str, Summary]], targets: list[Target], repetitions: int) -> str:
    """All results as Markdown."""
    distances = list(summaries)
    head = ["", *(f"{distance} iterations after the checkpoint" for distance in distances)]
    rows = [
        [words, *(summaries[d][name].text(_unit(name)) for d in distances)]
        for name, words in (STEPS | RESULTS | HELPED).items()
    ]
    intro = (
        "Four machines with one worker each on one host train the GPT of `examples/` (gloo, 1F1B); machine 1 "
        "gets SIGKILL in mid-forward, a spare takes its place. Seconds after the kill, each step when the "
        "last worker has done it. First the replacement replays alone, then as by default, with all "
        f"survivors as helpers. {of_repetitions(repetitions)}."
    )
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
