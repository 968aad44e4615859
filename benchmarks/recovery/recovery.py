"""How long a recovery takes, step by step, and against torchrun with DCP checkpoints.

The same failure at several distances from the last checkpoint, under swift-run and under torchrun in turns.
After each recovery the pure compute of the replayed stage is measured in a separate process.
Medians, and the range in parentheses. A repetition takes about six minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.results import (
    Summary,
    Target,
    append_results,
    argument_parser,
    machine,
    table,
    target_table,
)
from benchmarks.recovery.breakdown import measured
from benchmarks.recovery.compute import pure_compute
from examples.commands import CommandError
from examples.disturbed import Failure, plain, swift
from swift_ft.planning.simulation.calibration import MeasuredRecovery

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


def main() -> int:
    """Measures every distance and prints the report."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument(
        "--distances",
        type=int,
        nargs="+",
        default=[25, 49],
        metavar="N",
        help="completed iterations between the last checkpoint and the kill, default: 25 49",
    )
    args = parser.parse_args()
    samples: dict[int, list[dict[str, float]]] = {distance: [] for distance in args.distances}
    recoveries: list[MeasuredRecovery] = []
    try:
        for repetition in range(args.repetitions):
            for distance in args.distances:
                values, both = measure(distance)
                samples[distance].append(values)
                recoveries += both
                print(f"# {repetition + 1}, {distance}: {samples[distance][-1]}", file=sys.stderr, flush=True)
    except CommandError as error:
        print(f"recovery.py: {error}", file=sys.stderr)
        return 1
    summaries = {
        distance: {name: Summary.of([sample[name] for sample in some]) for name in some[0]}
        for distance, some in samples.items()
    }
    targets = judge(summaries)
    body = report(summaries, targets, args.repetitions)
    if args.json:
        print(json.dumps(as_json(samples, summaries, targets, recoveries), indent=1))
    else:
        print(body)
    if args.update:
        append_results("Recovery", body)
    return 0


def measure(distance: int) -> tuple[dict[str, float], list[MeasuredRecovery]]:
    """One failure at a distance from the last checkpoint, under swift-run and under torchrun.

    Returns:
        Seconds after the kill for each of ``STEPS``, and the values of ``RESULTS``; both recoveries in the
        format of ``swift-sim --calibrate``.
    """
    flags = ("--helpers", "0")  # a replay alone is what has a floor; see parallel.py
    failure = Failure(kill_iteration=2 * distance + 1, checkpoint_every=distance + 1, flags=flags)
    assert failure.distance == distance
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder = Path(name)
        outcome = swift(failure, failure.kill_iteration + 4, folder / "swift")
        if not outcome.replayed or outcome.iteration_s is None:
            raise CommandError(f"the recovery was no replay: {outcome.recoveries}")
        steps = outcome.timeline()
        replayed = sum(outcome.recoveries[0]["replayed_iterations"].values())
        pure_s = pure_compute(failure, replayed, folder).wall_s
        torchrun = plain(failure, folder / "torchrun")
    ordinary = torchrun.timeline()
    replay_s = steps["replayed"] - steps["loaded"]
    recovery, iteration_s = outcome.recoveries[0], outcome.iteration_s
    assert outcome.killed is not None
    assert outcome.loaded is not None
    ours = measured(recovery, outcome.killed, outcome.loaded, failure.checkpoint_every, iteration_s)
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
    }
    return values, [ours, theirs]


def judge(summaries: dict[int, dict[str, Summary]]) -> list[Target]:
    """What was asked for, against the medians."""
    targets = []
    for distance, values in summaries.items():
        at = f", {distance} iterations after the checkpoint"
        rest, replay, ratio = (values[name] for name in ("without_replay_s", "replay_ratio", "ratio"))
        targets += [
            Target(f"kill to live, without the replay{at}", "< 1.0 s", rest.text(), rest.median < 1.0),
            Target(f"replay / pure compute{at}", "<= 1.15", replay.text(""), replay.median <= 1.15),
            Target(f"faster than torchrun + DCP{at}", ">= 4", ratio.text("", 1), ratio.median >= 4.0),
        ]
    return targets


def report(summaries: dict[int, dict[str, Summary]], targets: list[Target], repetitions: int) -> str:
    """All results as Markdown."""
    distances = list(summaries)
    head = ["", *(f"{distance} iterations after the checkpoint" for distance in distances)]
    rows = [
        [words, *(summaries[d][name].text("" if name.endswith("ratio") else " s") for d in distances)]
        for name, words in (STEPS | RESULTS).items()
    ]
    intro = (
        "Four machines with one worker each on one host train the GPT of `examples/` (gloo, 1F1B); machine 1 "
        "gets SIGKILL in mid-forward, a spare takes its place. Seconds after the kill, each step when the "
        f"last worker has done it; medians (ranges) of {repetitions} interleaved repetitions."
    )
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


def as_json(
    samples: dict[int, list[dict[str, float]]],
    summaries: dict[int, dict[str, Summary]],
    targets: list[Target],
    recoveries: list[MeasuredRecovery],
) -> dict[str, Any]:
    """All results as JSON, which ``swift-sim --calibrate`` reads."""
    return {
        "machine": machine(),
        "distances": {
            str(distance): {
                "samples": samples[distance],
                "summary": {name: summary.to_dict() for name, summary in values.items()},
            }
            for distance, values in summaries.items()
        },
        "targets": [target.to_dict() for target in targets],
        "recoveries": [asdict(recovery) for recovery in recoveries],
    }


if __name__ == "__main__":
    sys.exit(main())
