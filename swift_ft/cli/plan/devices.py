"""``swift-plan devices``: pipelines of unlike devices."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import at_most
from swift_ft.cli.plan.arguments import MOST_DEVICES, microbatches
from swift_ft.cli.plan.machines import machines_of
from swift_ft.cli.plan.picture import STAGE_SECONDS, draw_bars
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS, read_layers
from swift_ft.planning.layout.cluster import read_cluster
from swift_ft.planning.layout.devices import DevicePlan, Pipeline, plan_devices
from swift_ft.units import format_seconds


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, required=True, help="cluster.json: the nodes")
    parser.add_argument(
        "--layers", type=Path, required=True, help="layers.json: times and state of each layer"
    )
    parser.add_argument(
        "--microbatches", type=microbatches, required=True, help="of each pipeline in an iteration"
    )
    parser.add_argument(
        "--tp", type=at_most(MOST_DEVICES), help="degree of tensor parallelism (default: the best)"
    )
    parser.add_argument(
        "--tensor-overhead",
        type=float,
        default=0.05,
        help="by which part each doubling of tp falls short of twice the speed (default 0.05)",
    )
    parser.add_argument(
        "--measured-on",
        metavar="TYPE",
        help="the type that the times of the layers are for (default: the fastest)",
    )
    parser.add_argument("--plot", type=Path, help="draw the stages into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    plan = plan_devices(
        read_cluster(args.cluster),
        read_layers(args.layers),
        args.microbatches,
        tp=args.tp,
        tensor_overhead=args.tensor_overhead,
        measured_on=args.measured_on,
    )
    if args.plot:
        draw_bars([_bar(number, one) for number, one in enumerate(plan.pipelines)], STAGE_SECONDS, args.plot)
    if args.json:
        print_json(_to_json(plan, args.microbatches))
    else:
        _print(plan, args.microbatches)
    return ExitCode.OK


def _to_json(plan: DevicePlan, microbatches: int) -> dict[str, object]:
    machines, per_machine = machines_of([one.nodes for one in plan.pipelines])
    return {
        "tp": plan.tp,
        "pipelines": [
            {
                "devices": one.devices,
                "stages": [list(stage) for stage in one.stages],
                "microbatches": microbatches,
                "machines": of_workers,
                "nodes": list(one.nodes),
            }
            for one, of_workers in zip(plan.pipelines, machines, strict=True)
        ],
        "workers_per_machine": per_machine,
        "iteration_s": plan.iteration_ns / NANOSECONDS,
    }


def _bar(number: int, one: Pipeline) -> tuple[str, list[tuple[str, float]]]:
    """A pipeline as a bar: each stage with its layers and its type of device."""
    parts = [
        (f"{first}-{last}\n{kind}", time_ns / NANOSECONDS)
        for (first, last), kind, time_ns in zip(one.stages, one.kinds, one.times_ns, strict=True)
    ]
    return f"pipeline {number}\n{format_seconds(one.iteration_ns / NANOSECONDS)}", parts


def _print(plan: DevicePlan, microbatches: int) -> None:
    table = Table("pipeline", "devices", "stages: layers, type, node", "iteration")
    for number, one in enumerate(plan.pipelines):
        devices = ", ".join(f"{count} {kind}" for kind, count in one.devices.items())
        stages = "; ".join(
            f"{first}-{last} {kind} #{node}"
            for (first, last), kind, node in zip(one.stages, one.kinds, one.nodes, strict=True)
        )
        table.add_row(str(number), devices, stages, format_seconds(one.iteration_ns / NANOSECONDS))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(
        f"tp = {plan.tp}, {len(plan.pipelines)} pipelines of {microbatches} microbatches each: "
        f"{format_seconds(plan.iteration_ns / NANOSECONDS)} per iteration"
    )
    if plan.idle:
        idle = ", ".join(f"{count} {kind}" for kind, count in plan.idle.items())
        console.print(f"idle, because they would make no pipeline faster: {idle}")
    if plan.gap:
        console.print(f"not proven best: another grouping has {plan.gap:.2%} more computing power at most")


VERB = Verb(
    description=(
        "Form pipelines of about equal power from devices of any types, and give each stage as many "
        "layers as its device is fast (AutoHet, section III). All replicas process as many microbatches."
    ),
    declare=_declare,
    run=_run,
)
