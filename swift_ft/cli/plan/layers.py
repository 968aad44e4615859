"""``swift-plan layers``: a ``layers.json`` from the shapes of a transformer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from swift_ft.cli.common import at_most, unit
from swift_ft.cli.plan.templates import console
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.layer_profile import NANOSECONDS, layers_to_json, write_layers
from swift_ft.errors import UsageError
from swift_ft.planning.layout.shapes import Shapes, from_powers, transformer_layers
from swift_ft.units import format_bytes, format_seconds, parse_seconds

_MOST_BLOCKS = 10_000
_MOST_BYTES = 1_024
"""Of a parameter."""
_MOST = 1 << 24  # words, or tokens of a sample: more than any model has


def parse_measured(text: str) -> tuple[dict[int, int], dict[int, int]]:
    """Forward and backward times by number of blocks, in nanoseconds, from ``1=10ms/20ms,2=19ms/38ms``.

    Raises:
        UsageError: if the text is none.
    """
    forward, backward = {}, {}
    for part in text.split(","):
        count, _, times = part.partition("=")
        first, slash, second = times.partition("/")
        if not count.strip().isdecimal() or not slash:
            raise UsageError(f"{part!r} is no measurement: write it like 1=10ms/20ms,2=19ms/38ms")
        forward[int(count)] = round(parse_seconds(first) * NANOSECONDS)
        backward[int(count)] = round(parse_seconds(second) * NANOSECONDS)
    return forward, backward


def _declare(parser: argparse.ArgumentParser) -> None:
    for name, meaning in (
        ("hidden", "width of the model"),
        ("blocks", "how many"),
        ("vocabulary", "words"),
        ("sequence", "tokens of a sample"),
    ):
        parser.add_argument(
            f"--{name}",
            type=at_most(_MOST_BLOCKS if name == "blocks" else _MOST),
            required=True,
            help=meaning,
        )
    parser.add_argument(
        "--microbatch", type=at_most(_MOST), default=1, help="samples of a microbatch (default 1)"
    )
    parser.add_argument(
        "--feed-forward", type=at_most(_MOST), help="inner width (default: four times --hidden)"
    )
    parser.add_argument(
        "--bytes-per-parameter",
        type=at_most(_MOST_BYTES),
        default=16,
        help="with gradient and optimizer (default 16)",
    )
    parser.add_argument("--tied", action="store_true", help="the head uses the embedding's weights")
    parser.add_argument("--tflops", type=float, required=True, help="that a device reaches, in 1e12/s")
    parser.add_argument(
        "--measured",
        type=unit(parse_measured),
        help="times of 1, 2, 4 ... blocks, forward/backward: 1=10ms/20ms,2=19ms/38ms",
    )
    parser.add_argument("--out", type=Path, help="write layers.json here")


def _run(args: argparse.Namespace) -> ExitCode:
    shapes = Shapes(
        args.hidden,
        args.blocks,
        args.vocabulary,
        args.sequence,
        args.microbatch,
        args.feed_forward,
        args.bytes_per_parameter,
        args.tied,
    )
    blocks_ns = None
    if args.measured:
        forward, backward = args.measured
        blocks_ns = (from_powers(args.blocks, forward), from_powers(args.blocks, backward))
    layers = transformer_layers(shapes, args.tflops * 1e12, blocks_ns)
    if args.out:
        write_layers(layers, args.out)
    if args.json:
        print_json(json.loads(layers_to_json(layers)))
        return ExitCode.OK
    table = Table("layer", "forward", "backward", "state", "activations")
    for layer in (layers[0], layers[1], layers[-1]):
        table.add_row(
            layer.name if layer is not layers[1] else f"{args.blocks} blocks, each",
            format_seconds(layer.forward_ns / NANOSECONDS),
            format_seconds(layer.backward_ns / NANOSECONDS),
            format_bytes(layer.state_bytes),
            format_bytes(layer.activation_bytes),
        )
    console().print(table)
    return ExitCode.OK


VERB = Verb(
    description=(
        "Estimate what each layer of a transformer costs from its shapes, or from the measured times of 1, "
        "2, 4 ... of its blocks. A measured file is better: swift-run --layers-out."
    ),
    declare=_declare,
    run=_run,
)
