"""The part of ``swift-sim`` for jobs whose number of nodes changes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import unit
from swift_ft.errors import UsageError
from swift_ft.planning.elastic_jobs import ELASTIC_PRESETS, losing_every, read_elastic_job, read_spot_trace
from swift_ft.planning.simulation.elastic import WAYS, Change, ElasticJob, ElasticOutcome, simulate_elastic
from swift_ft.units import format_seconds, parse_seconds


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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


def run_elastic(args: argparse.Namespace) -> None:
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
        _print(job, outcomes, duration_s)


def _job(args: argparse.Namespace) -> ElasticJob:
    job = ELASTIC_PRESETS.get(args.elastic) or read_elastic_job(Path(args.elastic))
    if args.hold is None:
        return job
    return replace(job, hold_s=args.hold)


def _duration(args: argparse.Namespace, changes: tuple[Change, ...]) -> float:
    """What was given; else until the last loss at intervals, or an hour after the last change of a trace."""
    if args.duration is not None:
        return float(args.duration)
    if not changes:
        raise UsageError("the trace has no change: give --duration")
    last = changes[-1].time_s
    return last if args.lose_every is not None else last + 3600.0


def _print(job: ElasticJob, outcomes: list[ElasticOutcome], duration_s: float) -> None:
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
