"""``swift-plan instantiate``: the pipelines that use all nodes, and their shares of the batch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from rich.table import Table

from swift_ft.cli.plan.arguments import costs_of, declare_cluster, microbatches, options_of, templates_of
from swift_ft.cli.plan.machines import machines_of
from swift_ft.cli.plan.picture import draw_stages
from swift_ft.cli.plan.templates import console
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.planning.layout.instantiate import Instantiation, best_instantiation
from swift_ft.planning.layout.pipeline_template import Template
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.units import format_seconds


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_cluster(parser)
    parser.add_argument(
        "--global-batch", type=microbatches, required=True, help="microbatches of all pipelines"
    )
    parser.add_argument("--plot", type=Path, help="draw the stages into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    options, costs = options_of(args), costs_of(args)
    templates = {one.nodes: one for one in templates_of(args)}
    times = {
        nodes: PipelineTime.of(costs, one, options.schedule, options.transfer_ns)
        for nodes, one in templates.items()
    }
    found = best_instantiation(times, args.nodes, args.tolerate + 1, args.global_batch)
    rows = [
        (nodes, templates[nodes], share, times[nodes].exact(share))
        for nodes, share in zip(found.nodes, found.microbatches, strict=True)
    ]
    if args.plot:
        named = [(f"{n} nodes, {share} microbatches", one.stages, ns) for n, one, share, ns in rows]
        draw_stages(named, costs, args.plot)
    if args.json:
        print_json(_to_json(found, templates, args.devices_per_node))
        return ExitCode.OK
    table = Table("pipeline", "nodes", "stages", "microbatches", "iteration")
    for number, (nodes, template, share, time_ns) in enumerate(rows):
        cells = (number, nodes, len(template.stages), share, format_seconds(time_ns / NANOSECONDS))
        table.add_row(*map(str, cells))
    console().print(table)
    console().print(f"an iteration takes {format_seconds(found.iteration_ns / NANOSECONDS)}")
    return ExitCode.OK


def _to_json(
    found: Instantiation, templates: Mapping[int, Template], devices_per_node: int
) -> dict[str, object]:
    machines, per_machine = machines_of(_nodes(found, templates, devices_per_node))
    return {
        "pipelines": [
            {
                "nodes": nodes,
                "stages": [[stage.first, stage.end - 1] for stage in templates[nodes].stages],
                "devices": [stage.devices for stage in templates[nodes].stages],
                "microbatches": share,
                "machines": of_workers,
            }
            for nodes, share, of_workers in zip(found.nodes, found.microbatches, machines, strict=True)
        ],
        "workers_per_machine": per_machine,
        "stages_per_worker": templates[found.nodes[0]].stages_per_worker,
        "iteration_s": found.iteration_ns / NANOSECONDS,
    }


def _nodes(found: Instantiation, templates: Mapping[int, Template], devices_per_node: int) -> list[list[int]]:
    """The node of each worker of each pipeline: stages fill nodes in order."""
    nodes, before = [], 0
    for count in found.nodes:
        template = templates[count]
        devices = [0, *accumulate(stage.devices for stage in template.stages[: template.workers])]
        nodes.append([before + first // devices_per_node for first in devices[:-1]])
        before += count
    return nodes


VERB = Verb(
    description=(
        "Choose the set of templates that uses all nodes, survives the losses asked for, and does the global "
        "batch in the shortest time (Oobleck, section 4.2)."
    ),
    declare=_declare,
    run=_run,
)
