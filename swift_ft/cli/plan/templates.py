"""``swift-plan templates``: for each number of nodes the best cut of a model into stages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_ft.cli.plan.arguments import costs_of, declare_cluster, templates_of
from swift_ft.cli.plan.picture import draw_stages, named
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.planning.layout.instantiate import count_sets
from swift_ft.planning.layout.pipeline_template import Template
from swift_ft.units import format_seconds


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_cluster(parser)
    parser.add_argument("--plot", type=Path, help="draw the stages into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    templates = templates_of(args)
    sets = count_sets([one.nodes for one in templates], args.nodes, args.tolerate + 1)
    if args.plot:
        rows = [(f"{one.nodes} nodes", one.stages, one.iteration_ns) for one in templates]
        draw_stages(rows, costs_of(args), args.plot)
    if args.json:
        print_json({"templates": [_to_json(one) for one in templates], "sets": sets})
        return ExitCode.OK
    _print(templates, sets, args)
    return ExitCode.OK


def _to_json(template: Template) -> dict[str, object]:
    return {
        "nodes": template.nodes,
        "stages": [[stage.first, stage.end - 1] for stage in template.stages],
        "devices": [stage.devices for stage in template.stages],
        "iteration_s": template.iteration_ns / NANOSECONDS,
        "proven": template.proven,
    }


def _print(templates: Sequence[Template], sets: int, args: argparse.Namespace) -> None:
    table = Table("nodes", "layers of each stage", "devices", "microbatches", "iteration", "optimal")
    add_template_rows(table, templates)
    console().print(table)
    console().print(
        f"{sets} sets of these use {args.nodes} nodes with at least {args.tolerate + 1} pipelines "
        "(swift-plan instantiate chooses one)"
    )


def add_template_rows(table: Table, templates: Sequence[Template]) -> None:
    """Add a row for each template."""
    for one in templates:
        table.add_row(
            str(one.nodes),
            " ".join(named(stage) for stage in one.stages),
            " ".join(str(stage.devices) for stage in one.stages),
            str(one.microbatches),
            format_seconds(one.iteration_ns / NANOSECONDS),
            "proven" if one.proven else f"within {100 * one.gap:.2g} %",
        )


def console() -> Console:
    """Prints long lines as they are, without markup."""
    return Console(soft_wrap=True, highlight=False, markup=False)


VERB = Verb(
    description=(
        "Cut a model into stages for each number of nodes that a pipeline may get when machines are lost "
        "(Oobleck, section 4.1), by the exact time of an iteration. Says whether a cut is proven best."
    ),
    declare=_declare,
    run=_run,
)
