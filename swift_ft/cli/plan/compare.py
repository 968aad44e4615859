"""``swift-plan compare``: one pipeline under all schedules, and what papers' sums say of it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from swift_ft.cli.common import at_most
from swift_ft.cli.plan.arguments import MOST_NODES, costs_of, declare_model, options_of
from swift_ft.cli.plan.picture import draw_bars
from swift_ft.cli.plan.templates import console
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.costs.schedule_orders import Schedule, is_allowed
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import makespan_ns
from swift_ft.planning.layout.pipeline_template import Template, TemplateOptions
from swift_ft.planning.layout.pipeline_time import autohet_ns, oobleck_ns
from swift_ft.planning.layout.templates import best_template
from swift_ft.units import format_seconds


class _Pipeline(NamedTuple):
    """A schedule, and the cut that it runs."""

    schedule: Schedule
    template: Template


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule's iteration."""

    schedule: Schedule
    workers: int
    stages_per_worker: int
    iteration_s: float
    bubble: float
    """Part of the time in which a worker computes nothing, on average."""
    oobleck: float
    """Error of Oobleck's equations for one stage per worker, as a part of the exact time."""
    autohet: float
    """Likewise, of AutoHet's."""


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_model(parser)
    parser.add_argument("--nodes", type=at_most(MOST_NODES), required=True, help="of the pipeline")
    parser.add_argument("--plot", type=Path, help="draw what is computed and what is idle into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    options, costs = options_of(args, "1f1b"), costs_of(args)
    single = best_template(costs, args.nodes, options)
    stages = [costs.time(*stage) for stage in single.stages]
    estimates = [of(stages, single.microbatches) for of in (oobleck_ns, autohet_ns)]
    rows = [_row(costs, one, *estimates) for one in _pipelines(costs, single, options)]
    if args.plot:
        draw_bars([_bar(row) for row in rows], "seconds of an iteration, of a worker on average", args.plot)
    if args.json:
        print_json({"schedules": [_to_json(row) for row in rows], "microbatches": single.microbatches})
    else:
        _print(rows, single.microbatches)
    return ExitCode.OK


def _row(costs: StageCosts, pipeline: _Pipeline, oobleck: int, autohet: int) -> _Row:
    cut = pipeline.template
    exact = cut.iteration_ns
    busy = sum(costs.time(*stage).compute_ns for stage in cut.stages) * cut.microbatches
    return _Row(
        pipeline.schedule,
        cut.workers,
        cut.stages_per_worker,
        exact / NANOSECONDS,
        1 - busy / (exact * cut.workers),
        oobleck / exact - 1,
        autohet / exact - 1,
    )


def _pipelines(costs: StageCosts, single: Template, options: TemplateOptions) -> Iterator[_Pipeline]:
    """The pipeline under each schedule that takes its sizes.

    Those with one stage per worker run the same cut; the others have cuts of their own.
    """
    sizes = {"workers": single.workers, "microbatches": single.microbatches}
    for schedule in Schedule:
        if schedule.least_chunks == 1 and is_allowed(schedule, **sizes):
            yield _Pipeline(
                schedule, replace(single, iteration_ns=_exact_ns(costs, single, schedule, options))
            )
        elif schedule.least_chunks > 1:
            own = replace(options, schedule=schedule, microbatches=single.microbatches, stages_per_worker=0)
            with contextlib.suppress(UsageError):  # too few layers, or no such number of microbatches
                yield _Pipeline(schedule, best_template(costs, single.nodes, own))


def _exact_ns(costs: StageCosts, cut: Template, schedule: Schedule, options: TemplateOptions) -> int:
    stages = [costs.time(*stage) for stage in cut.stages]
    return makespan_ns(stages, cut.microbatches, schedule, transfer_ns=options.transfer_ns)


def _to_json(row: _Row) -> dict[str, object]:
    return {
        "schedule": str(row.schedule),
        "workers": row.workers,
        "stages_per_worker": row.stages_per_worker,
        "iteration_s": row.iteration_s,
        "bubble": row.bubble,
        "oobleck_error": row.oobleck,
        "autohet_error": row.autohet,
    }


def _bar(row: _Row) -> tuple[str, list[tuple[str, float]]]:
    idle_s = row.bubble * row.iteration_s
    return str(row.schedule), [("computing", row.iteration_s - idle_s), ("idle", idle_s)]


def _print(rows: list[_Row], microbatches: int) -> None:
    table = Table(
        "schedule", "workers", "stages each", "iteration", "idle", "Oobleck's equations", "AutoHet's equation"
    )
    for row in rows:
        table.add_row(
            str(row.schedule),
            str(row.workers),
            str(row.stages_per_worker),
            format_seconds(row.iteration_s),
            f"{row.bubble:.1%}",
            f"{row.oobleck:+.1%}",
            f"{row.autohet:+.1%}",
        )
    console().print(table)
    console().print(f"{microbatches} microbatches; the times are exact")


VERB = Verb(
    description=(
        "Cut a model for all nodes as one pipeline, and show the exact time of an iteration under each "
        "schedule of torch, beside what the sums of two papers say."
    ),
    declare=_declare,
    run=_run,
)
