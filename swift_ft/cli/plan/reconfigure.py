"""``swift-plan reconfigure``: which nodes form which pipelines after a loss, and with more nodes."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import at_most, unit
from swift_ft.cli.plan.arguments import MOST_NODES, costs_of, declare_model, microbatches, options_of
from swift_ft.cli.plan.picture import draw_bars
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.errors import UsageError
from swift_ft.planning.layout.instantiate import best_instantiation, deal
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import node_counts, templates_for
from swift_ft.recovery.layout.change import Change
from swift_ft.recovery.layout.losses import Pipelines, moved, reconfigure, reform
from swift_ft.units import format_seconds, parse_seconds


def parse_pipelines(text: str) -> Pipelines:
    """Pipelines from ``[[0, 1], [2, 3, 4]]``.

    Raises:
        argparse.ArgumentTypeError: if the text is not a list of lists of node numbers.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(nodes, list) for nodes in value):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lists: write it like '[[0,1],[2,3,4]]'")
    for node in (node for nodes in value for node in nodes):
        if isinstance(node, bool) or not isinstance(node, int) or node < 0:
            raise argparse.ArgumentTypeError(f"{json.dumps(node)} is no node: nodes are numbers from 0 up")
    return tuple(tuple(nodes) for nodes in value)


def parse_nodes(text: str) -> frozenset[int]:
    """Nodes from ``1,3,7`` or ``1-11``, or both.

    Raises:
        argparse.ArgumentTypeError: if the text is not a list of nodes.
    """
    nodes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"{part!r} is no node: write nodes like 1,3,7 or 1-11")
        low, high = int(first), int(last or first)
        if high < low:
            raise argparse.ArgumentTypeError(f"{part!r} names no node: write it as {high}-{low}")
        if high - low > 1_000_000:
            raise argparse.ArgumentTypeError(f"{part!r} are more than a million nodes")
        nodes.update(range(low, high + 1))
    return frozenset(nodes)


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipelines", type=parse_pipelines, required=True, help="nodes of each: [[0,1],[2,3,4]]"
    )
    parser.add_argument("--lost", type=parse_nodes, default=frozenset(), help="nodes: 1,3,7 or 1-11")
    parser.add_argument(
        "--min-nodes", type=at_most(MOST_NODES), required=True, help="nodes of the smallest pipeline"
    )
    parser.add_argument(
        "--added", type=parse_nodes, default=frozenset(), help="new nodes; need --layers and --global-batch"
    )
    parser.add_argument("--global-batch", type=microbatches, help="microbatches of all pipelines")
    parser.add_argument(
        "--change", type=unit(parse_seconds), default=30.0, help="how long a change takes (default 30s)"
    )
    declare_model(parser, required=False)
    parser.add_argument("--plot", type=Path, help="draw which nodes stay in which pipeline into this file")
    parser.add_argument(
        "--tolerate",
        type=at_most(MOST_NODES),
        default=0,
        help="losses to survive next: keep one pipeline more (default 0)",
    )


def _run(args: argparse.Namespace) -> ExitCode:
    if args.tolerate < 0:
        raise UsageError(f"--tolerate is {args.tolerate}: it must be 0 or more")
    after = reconfigure(args.pipelines, args.lost, min_nodes=args.min_nodes, tolerate=args.tolerate)
    change = None
    if args.added:
        after, change = _grown(after, args)
    if args.plot:
        draw_bars(_bars(args.pipelines, after), "nodes, by the pipeline that they come from", args.plot)
    if args.json:
        print_json({"pipelines": after, **(_to_json(change) if change else {})})
    else:
        _print(args.pipelines, after, change)
    return ExitCode.OK


def _grown(pipelines: Pipelines, args: argparse.Namespace) -> tuple[Pipelines, Change]:
    """The best pipelines with the new nodes, and what changing to them brings."""
    if args.layers is None or args.global_batch is None:
        raise UsageError("--added needs --layers and --global-batch: costs of layers say what is best")
    costs, options = costs_of(args), options_of(args, "1f1b")
    nodes = sum(map(len, pipelines)) + len(args.added)
    if nodes > MOST_NODES:
        raise UsageError(f"{nodes} nodes are too many to plan for: {MOST_NODES} at most")
    counts = node_counts(nodes, args.tolerate, args.min_nodes, len(costs.layers))
    present = [len(one) for one in pipelines]
    templates = templates_for(costs, sorted({*counts, *present}), options)
    times = {
        one.nodes: PipelineTime.of(costs, one, options.schedule, options.transfer_ns) for one in templates
    }
    own = [times[size] for size in present]
    shares = deal(own, args.global_batch)
    before_ns = max(time.exact(share) for time, share in zip(own, shares, strict=True))
    best = best_instantiation({n: times[n] for n in counts}, nodes, args.tolerate + 1, args.global_batch)
    change = Change(before_ns, best.iteration_ns, round(args.change * NANOSECONDS))
    return reform(pipelines, best.nodes, args.added), change


def _to_json(change: Change) -> dict[str, object]:
    return {
        "before_s": change.before_ns / NANOSECONDS,
        "iteration_s": change.after_ns / NANOSECONDS,
        "pays_after_iterations": change.pays_after,
    }


def _bars(before: Pipelines, after: Pipelines) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each pipeline, how many of its nodes come from which."""
    home = _homes(before)
    bars = []
    for number, nodes in enumerate(after):
        origins = Counter(home.get(node, len(before)) for node in nodes)
        names = {origin: "new" if origin == len(before) else f"from {origin}" for origin in origins}
        parts = [(names[origin], float(count)) for origin, count in sorted(origins.items())]
        bars.append((f"pipeline {number}\n{len(nodes)} nodes", parts))
    return bars


def _homes(pipelines: Pipelines) -> dict[int, int]:
    """By node, its pipeline."""
    return {node: number for number, nodes in enumerate(pipelines) for node in nodes}


def _print(before: Pipelines, after: Pipelines, change: Change | None) -> None:
    home = _homes(before)
    table = Table("pipeline", "nodes", "from pipelines")
    for number, nodes in enumerate(after):
        origins = sorted({home[node] for node in nodes if node in home})
        new = ["new"] if any(node not in home for node in nodes) else []
        table.add_row(str(number), " ".join(map(str, nodes)), " ".join([*map(str, origins), *new]))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(f"{len(after)} pipelines: they survive the loss of any {len(after) - 1} of their nodes")
    left = [[node for node in nodes if any(node in one for one in after)] for nodes in before]
    count = moved(left, after)
    console.print(f"{count} node{'s come' if count != 1 else ' comes'} to another pipeline")
    if change is not None:
        console.print(_in_words(change))


def _in_words(change: Change) -> str:
    after, before = (format_seconds(ns / NANOSECONDS) for ns in (change.after_ns, change.before_ns))
    times = f"an iteration takes {after}, without the new nodes {before}"
    if change.pays_after is None:
        return f"{times}: the change does not pay"
    cost = format_seconds(change.cost_ns / NANOSECONDS)
    return (
        f"{times}: a change of {cost} has paid after {change.pays_after} iterations. Wait as many before it, "
        "and nodes that come and go cost at most twice what they would if their stay were known"
    )


VERB = Verb(
    description=(
        "Form pipelines of the nodes that are left after a loss. A pipeline that has lost nodes goes on with "
        "the others, borrows nodes from bigger pipelines, or merges with short ones (Oobleck, section 5.1). "
        "With nodes that are added, the pipelines that do the global batch in the shortest time are formed, "
        "and as few nodes as possible change their pipeline."
    ),
    declare=_declare,
    run=_run,
)
