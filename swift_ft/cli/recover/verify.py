"""``swift-recover verify``: everything in a store, and what damage in it would cost."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from swift_ft.cli.recover.progress import progress
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.offline.run_store import open_run_store, store_errors
from swift_ft.offline.verification import Verification, WorkerOutlook, bytes_to_verify, verify_store
from swift_ft.units import format_bytes


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="path or URL of the store")


def _run(args: argparse.Namespace) -> ExitCode:
    run = open_run_store(args.store)
    with store_errors(run.store):
        files = {path: facts.size for path, facts in run.store.find("").items()}
        with progress("verifying", bytes_to_verify(files)) as on_bytes:
            result = verify_store(run, files, on_bytes)
    if args.json:
        print_json(result.to_dict())
    else:
        _print(result)
    return ExitCode.FINDINGS if result.findings else ExitCode.OK


def _print(result: Verification) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{result.url}: run {result.run_id}")
    console.print(
        f"read {format_bytes(result.verified_bytes)}: {result.segments} log segments with {result.messages} "
        f"messages, {len(result.checkpoints)} checkpoints"
    )
    for checkpoint in result.checkpoints:
        state = "intact" if checkpoint.intact else "damaged"
        console.print(f"checkpoint of iteration {checkpoint.iteration}: {checkpoint.parts} parts, {state}")
    if result.workers:
        Console().print(_table(result.workers))
    for path, note in result.notes.items():
        console.print(f"note: {path}: {note}")
    for finding in result.findings:
        console.print(f"damaged: {finding.path}: {finding.what}")
        console.print(f"  -> {finding.consequence}")
    if not result.findings:
        console.print("nothing is damaged")


def _table(workers: tuple[WorkerOutlook, ...]) -> Table:
    table = Table()
    for column in ("worker", "stages", "replicas", "replay from", "to iteration"):
        table.add_column(column, justify="right")
    table.add_column("why not further")
    for worker in workers:
        table.add_row(
            str(worker.rank),
            _listed(worker.stages),
            _listed(worker.replicas),
            _number(worker.begin),
            _number(worker.until),
            worker.remark + (f" (together with {_listed(worker.together)})" if worker.together else ""),
        )
    return table


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers)) or "-"


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)


VERB = Verb(
    description=(
        "Read every log segment and every checkpoint of a store, verify all checksums, and say which worker "
        "could not be replayed. A run may be alive meanwhile; nothing is written."
    ),
    declare=_declare,
    run=_run,
)
