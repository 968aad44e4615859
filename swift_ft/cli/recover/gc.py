"""``swift-recover gc``: deletes what no recovery needs. The only verb that writes to a store of a run."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from swift_ft.cli.recover.progress import progress
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.offline.garbage import GarbageReport, delete_garbage, find_garbage
from swift_ft.offline.run_store import open_run_store, store_errors
from swift_ft.units import format_bytes

__all__ = ["VERB"]


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="path or URL of the store")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be deleted, and delete nothing"
    )
    parser.add_argument(
        "--yes", action="store_true", help="the run is over, even if its journal does not say so"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    run = open_run_store(args.store, writable=not args.dry_run)
    with store_errors(run.store):
        report = find_garbage(run)
    if not args.dry_run:
        with store_errors(run.store, "written"), progress("deleting", report.total_bytes) as on_bytes:
            delete_garbage(run, report, over=args.yes, on_bytes=on_bytes)
    if args.json:
        print_json({**report.to_dict(), "deleted": not args.dry_run})
    else:
        _print(report, deleted=not args.dry_run)
    return ExitCode.OK


def _print(report: GarbageReport, *, deleted: bool) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    everything = (*report.garbage, *report.uploads)
    if everything:
        table = Table("what", "bytes", "why no recovery needs it")
        table.columns[1].justify = "right"
        for one in everything:
            table.add_row(one.path, format_bytes(one.size), one.why)
        Console().print(table)
    done = "deleted" if deleted else "could be deleted"
    total, whole = format_bytes(report.total_bytes), format_bytes(report.store_bytes)
    console.print(f"{report.url}: {len(everything)} things {done}, {total} of {whole}")
    if report.may_be_alive and not deleted:
        console.print(f"run {report.run_id} may be alive: {report.may_be_alive}")


VERB = Verb(
    "gc",
    help="delete what no recovery needs",
    description=(
        "Delete what killed workers, failed uploads, checkpoints that were never committed, and earlier runs "
        "have left in a store, and log segments older than its oldest checkpoint. Committed checkpoints "
        "stay. Nothing is deleted while the run may be alive, unless you say that it is over."
    ),
    declare=_declare,
    run=_run,
)
