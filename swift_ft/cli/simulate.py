"""``swift-sim``: training time under failures, strategy by strategy."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import OneLineParser, at_most, pyplot, save_plot, unit
from swift_ft.cli.first_help import SWIFT_SIM, add_version, shorten_help
from swift_ft.cli.verb import ended
from swift_ft.errors import UsageError
from swift_ft.planning.curves import Curve, interval_curves, mtbf_curves
from swift_ft.planning.elastic_jobs import ELASTIC_PRESETS, losing_every, read_elastic_job, read_spot_trace
from swift_ft.planning.presets import WORKLOAD_PRESETS, Fact, Workload, cluster_workload, preset_workload
from swift_ft.planning.simulation.elastic import WAYS, Change, ElasticJob, ElasticOutcome, simulate_elastic
from swift_ft.planning.simulation.failure_laws import Exponential, FailureLaw, Trace, Weibull
from swift_ft.planning.simulation.inputs import calibrate, read_calibration, read_failure_trace
from swift_ft.planning.simulation.strategies import Cluster
from swift_ft.planning.simulation.trials import Outcome, simulate
from swift_ft.units import format_seconds, parse_seconds

_MOST_MACHINES = 200_000
"""Beyond the largest clusters: a year of their failures takes minutes."""
_MOST_TRIALS = 100_000
_START_UP = ("detection", "replacement machine", "join")  # facts that a measured start-up replaces
_DURATIONS = {
    "detection": "from a failure to its detection (default 5s)",
    "replacement": "until a new machine is ready, without a spare (default 45s)",
    "join": "until the workers of the new machine have joined (default 40s)",
    "spare": "instead of --replacement, with a spare (default 0s)",
    "repair": "until a failed machine is a spare again (default: never)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return ended("swift-sim", partial(_run, argv))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(prog="swift-sim", description="End-to-end training time under failures.")
    seconds = unit(parse_seconds)
    parser.add_argument("--preset", choices=WORKLOAD_PRESETS, help="a job of the paper; else give --machines")
    parser.add_argument(
        "--machines",
        type=at_most(_MOST_MACHINES),
        help="number of units that fail independently: machines, or GPUs",
    )
    parser.add_argument("--mtbf-per-machine", type=seconds, help="mean time between failures of one: 50000h")
    parser.add_argument("--training-time", type=seconds, help="without failures: 54d")
    parser.add_argument(
        "--checkpoint-interval", type=seconds, help="training time between checkpoints (default 1h)"
    )
    parser.add_argument(
        "--checkpoint-stall",
        type=seconds,
        default=30.0,
        help="stall of training per checkpoint (default 30s)",
    )
    parser.add_argument(
        "--checkpoint-load", type=seconds, default=120.0, help="loading a checkpoint (default 120s)"
    )
    parser.add_argument(
        "--law",
        choices=("exponential", "weibull"),
        help="of failures (default: the preset's, or exponential)",
    )
    parser.add_argument("--shape", type=float, default=0.7, help="of the Weibull law (default 0.7)")
    parser.add_argument("--trace", type=Path, help="CSV of recorded failures: time [s], machine")
    for name, meaning in _DURATIONS.items():
        parser.add_argument(f"--{name}", type=seconds, help=meaning)
    parser.add_argument(
        "--spares", type=at_most(_MOST_MACHINES), help="idle machines that have joined already (default 0)"
    )
    parser.add_argument("--burst", type=float, help="probability that a neighbour fails, too (default 0)")
    parser.add_argument(
        "--calibrate", type=Path, help="JSON file of measured recoveries, instead of assumptions"
    )
    parser.add_argument(
        "--trials", type=at_most(_MOST_TRIALS), default=200, help="simulated trainings (default 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn failures (default 0)")
    parser.add_argument(
        "--plot", type=Path, help="draw time against checkpoint interval and failure frequency"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_elastic_options(parser)
    shorten_help(parser, SWIFT_SIM)
    add_version(parser)
    return parser


def _run(argv: Sequence[str] | None) -> None:
    args = parser().parse_args(argv)
    if args.elastic is not None:
        _run_elastic(args)
        return
    if args.spot or args.lose_every or args.duration or args.hold:
        raise UsageError("--spot, --lose-every, --duration and --hold are for --elastic JOB: name a job")
    workload = _workload(args)
    if args.calibrate:
        workload = _calibrated(workload, args.calibrate)
    outcomes = simulate(
        workload.strategies,
        work_s=workload.work_s,
        cluster=workload.cluster,
        law=workload.law,
        trials=args.trials,
        seed=args.seed,
    )
    if args.plot:
        _plot(workload, args.plot)
    if args.json:
        print(json.dumps(_answer(workload, outcomes, args)))
    else:
        _print(Console(), workload, outcomes)


def _calibrated(workload: Workload, path: Path) -> Workload:
    """The workload with measured recoveries and their facts."""
    measured = read_calibration(path)
    strategies, cluster = calibrate(workload.strategies, workload.cluster, measured)
    source, names = f"measured: {path}", {record.strategy for record in measured}
    facts = [fact for fact in workload.facts if fact.name not in _START_UP]
    facts.append(Fact("start-up", cluster.startup_s, "s", source))
    for strategy in strategies:
        if strategy.name in names:
            facts.append(Fact(f"start-up beyond it, {strategy.name}", strategy.extra_startup_s, "s", source))
            facts.append(Fact(f"restore, {strategy.name}", strategy.restore_s, "s", source))
            facts.append(Fact(f"replay, {strategy.name}", strategy.replay_factor, "of recomputation", source))
    return replace(workload, strategies=strategies, cluster=cluster, facts=tuple(facts))


def _workload(args: argparse.Namespace) -> Workload:
    if args.preset:
        if any(value is not None for value in (args.machines, args.training_time, args.checkpoint_interval)):
            raise UsageError("--preset sets --machines, --training-time and --checkpoint-interval itself")
        workload = preset_workload(args.preset)
        cluster = _cluster(args, workload.cluster)
    else:
        if args.machines is None or args.training_time is None:
            raise UsageError(
                "give --preset, or --machines, --training-time and --mtbf-per-machine (or --trace)"
            )
        if args.mtbf_per_machine is None and args.trace is None:
            raise UsageError("give --mtbf-per-machine or --trace")
        cluster = _cluster(args, Cluster(machines=args.machines))
        workload = cluster_workload(
            machines=args.machines,
            mtbf_s=args.mtbf_per_machine or args.training_time,
            work_s=args.training_time,
            checkpoint_interval_s=args.checkpoint_interval or 3600.0,
            checkpoint_stall_s=args.checkpoint_stall,
            load_s=args.checkpoint_load,
            cluster=cluster,
        )
    law = _law(args, workload.law)
    facts = tuple(_as_set(fact, cluster) for fact in workload.facts)
    return replace(workload, cluster=cluster, law=law, facts=facts)


def _as_set(fact: Fact, cluster: Cluster) -> Fact:
    """A start-up fact with the value of the cluster."""
    value = {
        "detection": cluster.detection_s,
        "replacement machine": cluster.replacement_s,
        "join": cluster.join_s,
    }
    now = value.get(fact.name, fact.value)
    return fact if now == fact.value else Fact(fact.name, now, fact.unit, "given")


def _cluster(args: argparse.Namespace, cluster: Cluster) -> Cluster:
    changes: dict[str, Any] = {f"{name}_s": getattr(args, name) for name in _DURATIONS}
    changes |= {"spares": args.spares, "burst": args.burst}
    return replace(cluster, **{name: value for name, value in changes.items() if value is not None})


def _law(args: argparse.Namespace, default: FailureLaw) -> FailureLaw:
    if args.trace:
        return Trace(read_failure_trace(args.trace))
    if args.mtbf_per_machine is None:
        if args.law:
            raise UsageError("--law needs --mtbf-per-machine")
        return default
    if args.law == "weibull":
        return Weibull(args.mtbf_per_machine, args.shape)
    return Exponential(args.mtbf_per_machine)


def _answer(workload: Workload, outcomes: Sequence[Outcome], args: argparse.Namespace) -> dict[str, Any]:
    strategies = {outcome.strategy: outcome.to_dict() for outcome in outcomes}
    strategies["swift"] = strategies[workload.swift]
    return {
        "workload": workload.name,
        "failure_free_h": workload.work_s / 3600,
        "trials": args.trials,
        "seed": args.seed,
        "strategies": strategies,
        "facts": [asdict(fact) for fact in workload.facts],
    }


def _print(console: Console, workload: Workload, outcomes: Sequence[Outcome]) -> None:
    table = Table(title=f"{workload.name}: {workload.work_s / 3600:.1f} h without failures")
    for column in ("strategy", "hours", "± 95 %", "closed form", "lost", "goodput", "failures", "finished"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for o in outcomes:
        lost = o.hours - workload.work_s / 3600
        cells = (_hours(o.hours), _hours(o.ci95_hours), _hours(o.expected_hours), _hours(lost))
        table.add_row(o.strategy, *cells, f"{o.goodput:.3f}", f"{o.failures:.1f}", f"{o.finished:.0%}")
    console.print(table)
    console.print(f"The paper's SWIFT is {workload.swift} here. Inputs and their sources:")
    for fact in workload.facts:
        console.print(f"- {fact.name}: {fact.value:.6g} {fact.unit} ({fact.source})")


def _hours(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) and value < 1e7 else "never"


def _plot(workload: Workload, path: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    _draw(left, interval_curves(workload), "checkpoint or snapshot interval [h]")
    _draw(right, mtbf_curves(workload), "time between failures [h]")
    left.set_xscale("log")
    left.legend(fontsize="small")
    save_plot(figure, path)
    plt.close(figure)


def _draw(axes: Any, curves: Sequence[Curve], label: str) -> None:
    lowest = min(min(curve.hours) for curve in curves)
    for curve in curves:
        axes.plot(curve.x_hours, curve.hours, label=curve.strategy)
    axes.set_ylim(lowest * 0.98, lowest * 1.5)
    axes.set_xlabel(label)
    axes.set_ylabel("training time [h]")


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """The options for jobs whose number of nodes changes."""
    group = parser.add_argument_group("jobs whose number of nodes changes")
    seconds = unit(parse_seconds)
    group.add_argument(
        "--elastic",
        metavar="JOB",
        help=f"a JSON file with the throughput by nodes, or {', '.join(ELASTIC_PRESETS)}",
    )
    group.add_argument("--spot", type=Path, help="CSV of nodes that come and go: time [s], +n or -n")
    group.add_argument("--lose-every", type=seconds, help="instead: lose a node after each interval, to half")
    group.add_argument("--duration", type=seconds, help="how long (default: an hour after the last change)")
    group.add_argument("--hold", type=seconds, help="take nodes in only after they have stayed so long")


def _run_elastic(args: argparse.Namespace) -> None:
    """Simulate all ways to go on, and print what they yield.

    Raises:
        UsageError: if the job or the trace makes no sense.
    """
    job = _job(args)
    if (args.spot is None) == (args.lose_every is None):
        raise UsageError("--elastic needs either --spot or --lose-every")
    if args.spot is not None:
        changes = read_spot_trace(args.spot)
    else:
        changes = losing_every(args.lose_every, job.nodes, job.nodes // 2)
    duration_s = _duration(args, changes)
    outcomes = [simulate_elastic(job, changes, duration_s, way) for way in WAYS]
    if args.json:
        strategies = {outcome.way: outcome.to_dict() for outcome in outcomes}
        print(json.dumps({"workload": args.elastic, "duration_s": duration_s, "strategies": strategies}))
    else:
        _print_elastic(job, outcomes, duration_s)


def _job(args: argparse.Namespace) -> ElasticJob:
    job = ELASTIC_PRESETS.get(args.elastic) or read_elastic_job(Path(args.elastic))
    if args.hold is None:
        return job
    return replace(job, hold_s=args.hold)


def _duration(args: argparse.Namespace, changes: tuple[Change, ...]) -> float:
    """Seconds to simulate: as given, else to the last loss at intervals, or an hour beyond a trace."""
    if args.duration is not None:
        return float(args.duration)
    if not changes:
        raise UsageError("the trace has no change: give --duration")
    last = changes[-1].time_s
    return last if args.lose_every is not None else last + 3600.0


def _print_elastic(job: ElasticJob, outcomes: list[ElasticOutcome], duration_s: float) -> None:
    table = Table(title=f"{job.nodes} nodes at the start, {format_seconds(duration_s)}")
    for column in ("way", "samples/s", "goodput", "of what the nodes could", "changes", "without training"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for one in outcomes:
        cells = (f"{one.throughput:.2f}", f"{one.goodput:.3f}", f"{one.of_available:.3f}")
        table.add_row(one.way, *cells, str(one.changes), format_seconds(one.down_s))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for way, meaning in WAYS.items():
        console.print(f"- {way}: {meaning}")
