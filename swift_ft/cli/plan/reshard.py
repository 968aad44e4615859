"""``swift-plan reshard``: what has to move from one layout to another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import at_most, unit
from swift_ft.cli.plan.arguments import MOST_DEVICES
from swift_ft.cli.plan.picture import draw_bars
from swift_ft.cli.plan.reconfigure import parse_nodes
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.json_files import read_text
from swift_ft.costs.layer_profile import read_layers
from swift_ft.errors import UsageError
from swift_ft.planning.layout.degree_names import degrees_of
from swift_ft.planning.layout.layer_tensors import layer_tensors
from swift_ft.planning.layout.move_time import Links, move_time
from swift_ft.recovery.layout.degrees import MOST, Degrees
from swift_ft.recovery.layout.mesh import Layout
from swift_ft.recovery.moves.plan import MovePlan, plan_moves
from swift_ft.recovery.moves.sources import Location
from swift_ft.units import format_bytes, format_seconds, parse_bandwidth

_DISTANCES = {0: "from the same node", 1: "from another node"}
_DEGREES_HELP = "tp=4,pp=2,dp=1, or a file of torchtitan, Megatron-LM or DeepSpeed"


def read_degrees(given: str, workers: int | None) -> Degrees:
    """Degrees from a file, or from the text itself where there is no such file.

    Raises:
        UsageError: if they cannot be read, are none, or do not fit the workers.
    """
    path = Path(given)
    is_text = "=" in given or given.lstrip().startswith(("--", "{"))
    if is_text and not _is_file(path):
        return degrees_of(given, workers)
    text = read_text(path)
    try:
        return degrees_of(text, workers)
    except UsageError as error:
        raise UsageError(f"{given}: {error}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def _declare(parser: argparse.ArgumentParser) -> None:
    for name, dest in (("from", "old"), ("to", "new")):
        parser.add_argument(f"--{name}", dest=dest, required=True, help=_DEGREES_HELP)
        parser.add_argument(
            f"--{name}-workers",
            dest=f"{dest}_workers",
            type=at_most(MOST, 1),
            help="all workers, where a degree is what is left of them",
        )
    parser.add_argument("--layers", type=Path, required=True, help="layers.json: the state of each layer")
    parser.add_argument("--lost", type=parse_nodes, default=frozenset(), help="devices that died: 1,3 or 4-7")
    parser.add_argument(
        "--devices-per-node",
        type=at_most(MOST_DEVICES),
        help="devices are on nodes in order; the nearest holder sends",
    )
    parser.add_argument(
        "--inside-link",
        type=unit(parse_bandwidth),
        help="of a device inside its node, in each direction: 450GB/s. Gives the least time of a change",
    )
    parser.add_argument(
        "--node-link",
        type=unit(parse_bandwidth),
        help="of a node's network adapter, in each direction: 400Gbps",
    )
    parser.add_argument(
        "--node-links", type=at_most(MOST_DEVICES, 1), default=1, help="adapters of a node (default 1)"
    )
    parser.add_argument("--plot", type=Path, help="draw what stays and what moves into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    before, after = read_degrees(args.old, args.old_workers), read_degrees(args.new, args.new_workers)
    zero, links = _zero(before, after), _links(args)
    layers = read_layers(args.layers)
    tensors = layer_tensors(layers, zero)
    old, new = (degrees.layout(len(layers), shared=zero > 0) for degrees in (before, after))
    if args.lost and max(args.lost) >= old.size:
        raise UsageError(f"--lost names device {max(args.lost)}: the old layout has 0 to {old.size - 1}")
    devices = _devices(old, new, args.lost)
    locations = _locations(max(devices, default=0) + 1, args.devices_per_node)
    ranks = after.ranks(shared=zero > 0)
    plan, ranked = (
        plan_moves(
            tensors,
            (old, before.ranks(shared=zero > 0)),
            (new, [*(devices[rank] for rank in ranks), *devices[len(ranks) :]]),
            lost=sorted(args.lost),
            locations=locations,
            in_order=in_order,
        )
        for in_order in (False, True)
    )
    state = sum(tensor.nbytes for tensor in tensors)
    time = None if links is None else move_time(plan, locations, links)
    if args.plot:
        named = (("most stays", plan), ("in order of ranks", ranked))
        draw_bars(
            [(name, _parts(one, locations)) for name, one in named], "bytes of the new layout", args.plot
        )
    if args.json:
        print_json(
            {
                "moved_bytes": plan.moved_bytes,
                "state_bytes": state,
                "rank_order_bytes": ranked.moved_bytes,
                **({} if time is None else {"least_s": time.seconds}),
            }
        )
    else:
        _print(plan, ranked, state, locations)
        if time is not None:
            inside, between = (format_seconds(part) for part in (time.inside_s, time.between_s))
            Console(soft_wrap=True).print(
                f"Takes at least {inside} inside nodes and {between} between them, at once.", highlight=False
            )
        by_rank = [device for _, device in sorted(zip(ranks, plan.placement, strict=True))]
        Console(soft_wrap=True).print("Device of each rank of the new layout:", *by_rank, highlight=False)
    return ExitCode.OK


def _links(args: argparse.Namespace) -> Links | None:
    """The speeds of links, if they were given."""
    given = (args.inside_link, args.node_link)
    if given == (None, None):
        return None
    if None in given or args.devices_per_node is None:
        raise UsageError("a time needs --inside-link, --node-link and --devices-per-node: give all three")
    return Links(args.inside_link, args.node_link, args.node_links)


def _zero(old: Degrees, new: Degrees) -> int:
    """The stage of ZeRO of both layouts; one that shares nothing has the other one's."""
    stages = {degrees.zero for degrees in (old, new)} - {0}
    if len(stages) > 1:
        raise UsageError(
            f"the layouts share state in stages {min(stages)} and {max(stages)} of ZeRO: choose the same for "
            "both, a profile of layers does not say how large each part is"
        )
    return max(stages, default=0)


def _devices(old: Layout, new: Layout, lost: frozenset[int]) -> list[int]:
    """The living devices of the old layout, and new ones with the next numbers if they are too few."""
    living = [device for device in range(old.size) if device not in lost]
    return living + list(range(old.size, old.size + max(0, new.size - len(living))))


def _locations(devices: int, per_node: int | None) -> dict[int, Location]:
    if per_node is None:
        return {}
    if per_node < 1:
        raise UsageError(f"--devices-per-node is {per_node}: a node has at least one device")
    return {device: (device // per_node,) for device in range(devices)}


def _parts(plan: MovePlan, locations: Mapping[int, Location]) -> list[tuple[str, float]]:
    """The bytes that stay, and those that come from each distance and from the checkpoint."""
    by_distance = plan.bytes_by_distance(locations)
    names = _DISTANCES if locations else {0: "from another device"}
    return [
        ("stays", plan.kept_bytes),
        *((names[levels], nbytes) for levels, nbytes in sorted(by_distance.items())),
        *(("from the checkpoint", n) for n in [plan.bytes_by_source().get(None, 0)] if n),
    ]


def _print(plan: MovePlan, ranked: MovePlan, state: int, locations: Mapping[int, Location]) -> None:
    sent = plan.bytes_by_source()
    by_distance = plan.bytes_by_distance(locations) if locations else {}
    busiest = max((nbytes for device, nbytes in sent.items() if device is not None), default=0)
    rows = [
        ("state of one model", state),
        ("stays where it is", plan.kept_bytes),
        ("moves", plan.moved_bytes),
        *((f"  {_DISTANCES[levels]}", nbytes) for levels, nbytes in sorted(by_distance.items())),
        ("  from the checkpoint", sent.get(None, 0)),
        ("  most from one device", busiest),
        ("would move in order of ranks", ranked.moved_bytes),
    ]
    table = Table("what", "bytes", "of the state")
    for name, nbytes in rows:
        table.add_row(name, format_bytes(nbytes), f"{nbytes / state:.3f}" if state else "")
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


VERB = Verb(
    description=(
        "Compare the slices that two layouts hold, give each rank of the new layout to the device that holds "
        "most of it, and count what still has to move (Tenplex, section 4). Degrees are text, or a file that "
        "configures torchtitan, Megatron-LM or DeepSpeed. Ranks count tp fastest, then cp, dp_shard, ep, pp "
        "and dp; with such a file pp slowest, as these frameworks do. Layers are dealt evenly to stages, in "
        "order, unless the file says otherwise; tp cuts the state of each layer evenly, and so do dp_shard, "
        "ep and cp where replicas share it."
    ),
    declare=_declare,
    run=_run,
)
