"""``swift-recover export``: a bundle for a bug report."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from swift_ft.cli.recover.progress import file_progress
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.offline.export import export_run
from swift_ft.offline.run_store import open_run_store
from swift_ft.units import format_bytes


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the store that the script gave to swift_ft.Session")
    parser.add_argument(
        "--run", metavar="R", dest="run_id", help="which run (default: the newest one in the store)"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="the file to write, such as report.tar.gz"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    with file_progress("reading the run") as on_file:
        run = open_run_store(args.store)
        bundle = export_run(run, args.run_id or run.run_id, args.out, on_file)
    if args.json:
        print_json(bundle.to_dict())
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        size = format_bytes(bundle.size_bytes)
        console.print(f"{bundle.path}: {size}, {bundle.entries} entries of the journal")
        console.print("no tensors, no credentials and no environment; names of hosts, scripts and files")
        for problem in bundle.problems:
            console.print(f"problem: {problem}")
    return ExitCode.FINDINGS if bundle.problems else ExitCode.OK


VERB = Verb(
    description="Write one file for a bug report: the journal of a run and its recoveries, run.json, the "
    "markers of its checkpoints, names and sizes of all files in the store, and versions. It holds no "
    "tensors, no credentials and no environment. The store stays as it is.",
    declare=_declare,
    run=_run,
)
