"""``swift-recover gc``: deletes what no recovery needs. The only verb that writes to a store of a run.

Of a cluster of etcd it deletes the runs that have ended (`coordination/etcd/stored_runs.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from swift_ft.cli.recover.progress import progress
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.config.store_address import ETCD, StoreAddress
from swift_ft.coordination.etcd.stored_runs import delete_run, stored_runs
from swift_ft.errors import UsageError
from swift_ft.offline.garbage import GarbageReport, delete_garbage, find_garbage
from swift_ft.offline.run_store import open_run_store, store_errors
from swift_ft.units import format_bytes, format_seconds

_RESTS_S = 3600.0
"""So long after its end a run stays in etcd: a machine that was frozen then has to read that it is over."""


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", metavar="STORE", help="path or URL of the store; or etcd-v3://HOST:PORT,HOST:PORT"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be deleted, and delete nothing"
    )
    parser.add_argument(
        "--yes", action="store_true", help="the run is over, even if its journal does not say so"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    if args.store.startswith(f"{ETCD}://"):
        return _run_in_etcd(args)
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


def _run_in_etcd(args: argparse.Namespace) -> ExitCode:
    if args.yes:
        raise UsageError("--yes is for a store of checkpoints: in etcd only a run that has ended is deleted")
    address = StoreAddress.parse(args.store)
    runs = stored_runs(address)
    over = [run for run in runs if run.has_ended and (run.silent_s or 0.0) >= _RESTS_S]
    if not args.dry_run:
        for run in over:
            delete_run(address, run.run_id)
    if args.json:
        of_each = [{**asdict(run), "garbage": run in over} for run in runs]
        print_json({"etcd": str(address), "runs": of_each, "deleted": not args.dry_run})
        return ExitCode.OK
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for run in runs:
        since = "" if run.silent_s is None else f", last event {format_seconds(run.silent_s)} ago"
        state = "has ended" if run.has_ended else "has not ended"
        what = ("could be deleted" if args.dry_run else "deleted") if run in over else "stays"
        console.print(f"{run.run_id}: {what}: {state}{since}, {run.keys} keys")
    done = "could be deleted" if args.dry_run else "deleted"
    console.print(f"{address}: {len(over)} of {len(runs)} runs {done}")
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
    description=(
        "Delete what killed workers, failed uploads, checkpoints that were never committed, and earlier runs "
        "have left in a store, and log segments older than its oldest checkpoint. Committed checkpoints "
        "stay. Nothing is deleted while the run may be alive, unless you say that it is over. Of etcd, where "
        "a run had its rendezvous, the keys of all runs are deleted that ended an hour ago or earlier."
    ),
    declare=_declare,
    run=_run,
)
