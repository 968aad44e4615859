"""``swift-plan compare``: one pipeline under all schedules, and what papers' sums say of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from swift_ft.cli.plan.arguments import costs_of, declare_model, options_of
from swift_ft.cli.plan.picture import draw_bars
from swift_ft.cli.plan.templates import console
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.planning.layout.estimates import autohet_ns, oobleck_ns
from swift_ft.planning.layout.makespan import makespan_ns
from swift_ft.planning.layout.orders import Schedule, is_allowed
from swift_ft.planning.layout.profile import NANOSECONDS
from swift_ft.planning.layout.templates import best_template
from swift_ft.units import format_seconds

__all__ = ["VERB"]


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule's iteration."""

    schedule: Schedule
    iteration_s: float
    bubble: float
    """Part of the time in which a worker computes nothing, on average."""
    oobleck: float
    """Error of Oobleck's equations, as a part of the exact time."""
    autohet: float
    """Likewise, of AutoHet's."""


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_model(parser)
    parser.add_argument("--nodes", type=int, required=True, help="of the pipeline")
    parser.add_argument("--plot", type=Path, help="draw what is computed and what is idle into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    options, costs = options_of(args, "1f1b"), costs_of(args)
    template = best_template(costs, args.nodes, options)
    stages = [costs.time(*stage) for stage in template.stages]
    rows = []
    for schedule in Schedule:
        if schedule.is_single or is_allowed(
            schedule, workers=len(stages), microbatches=template.microbatches
        ):
            exact = makespan_ns(stages, template.microbatches, schedule, transfer_ns=options.transfer_ns)
            busy = sum(stage.compute_ns for stage in stages) * template.microbatches
            rows.append(
                _Row(
                    schedule,
                    exact / NANOSECONDS,
                    1 - busy / (exact * len(stages)),
                    oobleck_ns(stages, template.microbatches) / exact - 1,
                    autohet_ns(stages, template.microbatches) / exact - 1,
                )
            )
    if args.plot:
        draw_bars([_bar(row) for row in rows], "seconds of an iteration, of a worker on average", args.plot)
    if args.json:
        print_json({"schedules": [_to_json(row) for row in rows], "microbatches": template.microbatches})
    else:
        _print(rows, len(stages), template.microbatches)
    return ExitCode.OK


def _to_json(row: _Row) -> dict[str, object]:
    return {
        "schedule": str(row.schedule),
        "iteration_s": row.iteration_s,
        "bubble": row.bubble,
        "oobleck_error": row.oobleck,
        "autohet_error": row.autohet,
    }


def _bar(row: _Row) -> tuple[str, list[tuple[str, float]]]:
    idle_s = row.bubble * row.iteration_s
    return str(row.schedule), [("computing", row.iteration_s - idle_s), ("idle", idle_s)]


def _print(rows: list[_Row], stages: int, microbatches: int) -> None:
    table = Table("schedule", "iteration", "idle", "Oobleck's equations", "AutoHet's equation")
    for row in rows:
        table.add_row(
            str(row.schedule),
            format_seconds(row.iteration_s),
            f"{row.bubble:.1%}",
            f"{row.oobleck:+.1%}",
            f"{row.autohet:+.1%}",
        )
    console().print(table)
    console().print(f"{stages} stages, one per worker, {microbatches} microbatches; the times are exact")


VERB = Verb(
    "compare",
    help="one pipeline under all schedules",
    description=(
        "Cut a model for all nodes as one pipeline, and show the exact time of an iteration under each "
        "schedule of torch, beside what the sums of two papers say."
    ),
    declare=_declare,
    run=_run,
)
