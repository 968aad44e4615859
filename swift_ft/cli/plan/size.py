"""``swift-plan size``: how many machines, and which."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from swift_ft.cli.common import at_most, unit
from swift_ft.cli.plan.arguments import MOST_NODES, microbatches
from swift_ft.cli.plan.templates import console
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import read_layers
from swift_ft.errors import UsageError
from swift_ft.planning.layout.machine_kinds import read_kinds
from swift_ft.planning.layout.sizing import Goal, MachineKind, Size, Work, knee, recommended, sizes
from swift_ft.units import format_seconds, parse_bandwidth, parse_bytes, parse_seconds

_LARGEST_BATCH = 1 << 30
_ROWS = 24
"""Sizes of a kind that are shown; of more, some of each range."""


def _declare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=Path, required=True, help="layers.json, as swift-run --layers-out writes it")
    add("--batch", type=at_most(_LARGEST_BATCH), required=True, help="samples of an iteration")
    add("--microbatches", type=microbatches, required=True, help="into which the batch is divided")
    add("--machines", type=at_most(MOST_NODES), help="that can be had, all like the measured ones")
    add("--memory", type=unit(parse_bytes), help="of each: 80GB (default: no limit)")
    add("--kinds", type=Path, help="kinds.json instead: unlike machines and their prices")
    add("--pipelines", type=at_most(MOST_NODES), help="(default: the best number)")
    add("--link", type=unit(parse_bandwidth), help="between machines: 5GB/s (default: averaging is free)")
    add("--overhead", type=unit(parse_seconds), default=0.0, help="of an iteration: 20ms (default 0)")
    add("--samples", type=float, help="to train: the cheapest size is recommended")
    add("--within", type=unit(parse_seconds), help="by when they are to be done: 48h")
    add("--budget", type=float, help="what they may cost: the fastest size is recommended")


def _run(args: argparse.Namespace) -> ExitCode:
    layers = tuple(read_layers(args.layers))
    work = Work(layers, args.batch, args.microbatches, args.pipelines, args.link, args.overhead)
    by_kind = [sizes(work, kind) for kind in _kinds(args)]
    best, why = recommended(by_kind, _goal(args))
    if args.json:
        print_json(
            {
                "sizes": [_to_json(size) for found in by_kind for size in found],
                "knees": [_to_json(knee(found)) for found in by_kind],
                "recommended": {**_to_json(best), "why": why},
            }
        )
        return ExitCode.OK
    for found in by_kind:
        _print(found, best)
    console().print(
        f"recommended: {best.machines} of {best.kind.name}, {best.samples_per_s:.4g} samples/s: {why}"
    )
    return ExitCode.OK


def _kinds(args: argparse.Namespace) -> list[MachineKind]:
    if (args.machines is None) == (args.kinds is None):
        raise UsageError("give either --machines or --kinds")
    if args.kinds is not None:
        return read_kinds(args.kinds)
    return [MachineKind("this kind", args.machines, memory_bytes=args.memory)]


def _goal(args: argparse.Namespace) -> Goal:
    if args.samples is None and (args.within is not None or args.budget is not None):
        raise UsageError("--within and --budget need --samples: how many are to be trained")
    if args.within is not None and args.budget is not None:
        raise UsageError("give either --within or --budget")
    if args.samples is not None and not args.samples > 0:
        raise UsageError(f"--samples is {args.samples:g}: it must be more than 0")
    return Goal(args.samples, args.within, args.budget)


def _print(found: Sequence[Size], best: Size) -> None:
    priced, bend = found[0].kind.price_per_hour > 0, knee(found)
    heads = ["machines", "pipelines", "iteration", "samples/s", "per machine"]
    table = Table(*heads, *["per hour", "per million samples"] * priced, "", title=found[0].kind.name)
    step = -(-len(found) // _ROWS)
    for number, size in enumerate(found):
        if number % step and size not in (bend, best) and number != len(found) - 1:
            continue
        cells = [str(size.machines), _pipelines(size), format_seconds(size.iteration_s)]
        cells += [f"{size.samples_per_s:.4g}", f"{size.samples_per_s / size.machines:.4g}"]
        if priced:
            cells += [f"{size.price_per_hour:.4g}", f"{size.price_per_million:.4g}"]
        marks = ["the knee"] * (size == bend) + ["recommended"] * (size == best)
        table.add_row(*cells, ", ".join(marks))
    console().print(table)


def _pipelines(size: Size) -> str:
    """``2 of 3, 1 of 4``: how many of how many machines."""
    counts = {nodes: size.pipelines.count(nodes) for nodes in sorted({*size.pipelines})}
    return ", ".join(f"{count} of {nodes}" for nodes, count in counts.items())


def _to_json(size: Size) -> dict[str, Any]:
    return {
        "kind": size.kind.name,
        "machines": size.machines,
        "pipelines": list(size.pipelines),
        "iteration_s": size.iteration_s,
        "samples_per_s": size.samples_per_s,
        "price_per_hour": size.price_per_hour,
        "price_per_million": size.price_per_million,
    }


VERB = Verb(
    description=(
        "Say what each number of machines of each kind would do and cost, where more of them bring little, "
        "and which to take."
    ),
    declare=_declare,
    run=_run,
)
