"""``swift-recover inspect``: one log segment."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.offline.segment import SegmentSummary, inspect_segment
from swift_ft.units import format_bytes


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("segment", metavar="SEGMENT", help="path or URL of the file")


def _run(args: argparse.Namespace) -> ExitCode:
    summary = inspect_segment(args.segment)
    if args.json:
        print_json(summary.to_dict())
    else:
        _print(summary)
    return ExitCode.FINDINGS if summary.damage else ExitCode.OK


def _print(summary: SegmentSummary) -> None:
    console = Console()
    console.print(f"{summary.path}: {format_bytes(summary.size_bytes)}", soft_wrap=True)
    if summary.run_id:
        where = f"worker {summary.rank} of run {summary.run_id}, generation {summary.generation}"
        console.print(f"written by {where}", soft_wrap=True)
    if summary.iterations:
        console.print("iterations {} to {}".format(*summary.iterations))
    if summary.boundaries:
        console.print(_table(summary))
    for line in summary.damage:
        console.print(f"damaged: {line}", soft_wrap=True, markup=False, highlight=False)
    if not summary.damage:
        console.print("all checksums match")


def _table(summary: SegmentSummary) -> Table:
    table = Table()
    for column in ("stages", "direction", "messages", "tensors", "stored", "receipts"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    for boundary in summary.boundaries:
        table.add_row(
            f"{boundary.source_stage} -> {boundary.destination_stage}",
            boundary.direction,
            str(boundary.messages),
            format_bytes(boundary.tensor_bytes),
            format_bytes(boundary.payload_bytes),
            str(boundary.receipts),
        )
    return table


VERB = Verb(
    description="Read one log segment, show whose messages it holds, and verify all checksums.",
    declare=_declare,
    run=_run,
)
