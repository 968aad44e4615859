"""The arguments that verbs of swift-plan share, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from swift_ft.cli.common import at_most, unit
from swift_ft.costs.layer_profile import NANOSECONDS, read_layers
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.pipeline_template import Template, TemplateOptions
from swift_ft.planning.layout.templates import node_counts, smallest_pipeline, templates_for
from swift_ft.units import parse_bytes, parse_seconds

MOST_NODES = 4_096
MOST_DEVICES = 1_024
"""Of a node."""
_MOST_MICROBATCHES = 65_536
_MOST_STAGES = 64


microbatches = at_most(_MOST_MICROBATCHES)
"""Parses a number of microbatches."""


def declare_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare what a model's stages cost.

    Args:
        required: whether the verb needs it.
    """
    parser.add_argument("--layers", type=Path, required=required, help="layers.json: what each layer costs")
    parser.add_argument(
        "--devices-per-node", type=at_most(MOST_DEVICES), default=1, help="of every node (default 1)"
    )
    parser.add_argument("--memory", type=unit(parse_bytes), help="of a device: 80GB (default: no limit)")
    parser.add_argument(
        "--microbatches",
        type=microbatches,
        help="of a pipeline's iteration, for templates (default: 4 per worker)",
    )
    parser.add_argument(
        "--transfer", type=unit(parse_seconds), default=0.0, help="of a message: 2ms (default 0)"
    )
    parser.add_argument(
        "--tensor-overhead",
        type=float,
        default=0.0,
        help="part by which each doubling of a stage's devices falls short (default 0)",
    )


def declare_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare a model, and the nodes for whose pipelines templates are made."""
    declare_model(parser)
    parser.add_argument("--nodes", type=at_most(MOST_NODES), required=True, help="that are there")
    parser.add_argument(
        "--schedule", choices=[str(one) for one in Schedule], default="1f1b", help="(default 1f1b)"
    )
    parser.add_argument(
        "--stages-per-worker",
        type=at_most(_MOST_STAGES),
        help="(default: 2 for schedules that have several, else 1)",
    )
    parser.add_argument(
        "--tolerate",
        type=at_most(MOST_NODES),
        default=1,
        help="losses at once that leave a copy of all (default 1)",
    )
    parser.add_argument(
        "--min-nodes",
        type=at_most(MOST_NODES),
        help="of the smallest pipeline (default: on which the model fits)",
    )


def costs_of(args: argparse.Namespace) -> StageCosts:
    """The costs of stages.

    Raises:
        UsageError: if the file is broken, or an argument makes no sense.
    """
    layers = read_layers(args.layers)
    return StageCosts(layers, args.devices_per_node, args.memory, args.tensor_overhead)


def options_of(args: argparse.Namespace, schedule: str | None = None) -> TemplateOptions:
    """The options of templates.

    Raises:
        UsageError: if an argument makes no sense.
    """
    if args.microbatches is not None and args.microbatches < 1:
        raise UsageError(f"--microbatches is {args.microbatches}: it must be at least 1")
    transfer_ns = round(args.transfer * NANOSECONDS)
    if schedule is not None:
        return TemplateOptions(args.microbatches, Schedule(schedule), transfer_ns)
    if args.stages_per_worker is not None and args.stages_per_worker < 1:
        raise UsageError(f"--stages-per-worker is {args.stages_per_worker}: it must be at least 1")
    chunks = args.stages_per_worker or 0
    return TemplateOptions(args.microbatches, Schedule(args.schedule), transfer_ns, chunks)


def templates_of(args: argparse.Namespace) -> tuple[Template, ...]:
    """The templates for a cluster.

    Raises:
        UsageError: which constraint is not met, by how much, and what would do.
    """
    costs, options = costs_of(args), options_of(args)
    smallest = args.min_nodes
    if smallest is None:
        smallest = smallest_pipeline(costs, args.nodes, options)
    counts = node_counts(args.nodes, args.tolerate, smallest, len(costs.layers) // options.stages_per_worker)
    return templates_for(costs, counts, options)
