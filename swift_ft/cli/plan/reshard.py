"""``swift-plan reshard``: what has to move from one layout to another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import at_most
from swift_ft.cli.plan.arguments import MOST_DEVICES
from swift_ft.cli.plan.picture import draw_bars
from swift_ft.cli.plan.reconfigure import parse_nodes
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import read_layers
from swift_ft.errors import UsageError
from swift_ft.planning.layout.layer_tensors import layer_tensors
from swift_ft.recovery.layout.mesh import Layout, even_layout
from swift_ft.recovery.moves.plan import MovePlan, plan_moves
from swift_ft.recovery.moves.sources import Location
from swift_ft.units import format_bytes

_DEGREES = ("dp", "pp", "ep", "sp", "tp")
_MOST = 65_536
_DISTANCES = {0: "from the same node", 1: "from another node"}


def parse_degrees(text: str) -> dict[str, int]:
    """Degrees from ``tp=4,pp=2,dp=1``; those that are missing are 1.

    Raises:
        argparse.ArgumentTypeError: if the text is not a list of degrees.
    """
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _DEGREES or name in degrees or not value.isdecimal() or not 1 <= int(value) <= _MOST:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no degree: write {text!r} like tp=4,pp=2,dp=1, of {', '.join(_DEGREES)}"
            )
        degrees[name] = int(value)
    return degrees


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="old", type=parse_degrees, required=True, help="tp=4,pp=2,dp=1")
    parser.add_argument("--to", dest="new", type=parse_degrees, required=True, help="tp=4,pp=4,dp=1")
    parser.add_argument("--layers", type=Path, required=True, help="layers.json: the state of each layer")
    parser.add_argument("--lost", type=parse_nodes, default=frozenset(), help="devices that died: 1,3 or 4-7")
    parser.add_argument(
        "--devices-per-node",
        type=at_most(MOST_DEVICES),
        help="devices are on nodes in order; the nearest holder sends",
    )
    parser.add_argument("--plot", type=Path, help="draw what stays and what moves into this file")


def _run(args: argparse.Namespace) -> ExitCode:
    layers = read_layers(args.layers)
    tensors = layer_tensors(layers)
    old, new = even_layout(len(layers), **args.old), even_layout(len(layers), **args.new)
    for layout in (old, new):
        if layout.size > _MOST:
            raise UsageError(f"a layout of {layout.size} devices is too large: {_MOST} at most")
    if args.lost and max(args.lost) >= old.size:
        raise UsageError(f"--lost names device {max(args.lost)}: the old layout has 0 to {old.size - 1}")
    devices = _devices(old, new, args.lost)
    locations = _locations(max(devices, default=0) + 1, args.devices_per_node)
    plan, ranked = (
        plan_moves(
            tensors,
            (old, range(old.size)),
            (new, devices),
            lost=sorted(args.lost),
            locations=locations,
            in_order=in_order,
        )
        for in_order in (False, True)
    )
    state = sum(tensor.nbytes for tensor in tensors)
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
            }
        )
    else:
        _print(plan, ranked, state, locations)
    return ExitCode.OK


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
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print("Device of each rank of the new layout: " + " ".join(map(str, plan.placement)))


VERB = Verb(
    description=(
        "Compare the slices that two layouts hold, give each rank of the new layout to the device that holds "
        "most of it, and count what still has to move (Tenplex, section 4). Ranks count tp fastest, then sp, "
        "ep, pp and dp. Layers are dealt evenly to stages, in order; tp cuts the state of each layer evenly."
    ),
    declare=_declare,
    run=_run,
)
