"""``swift-recover status``: where a run stands, and what it would lose now."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from swift_ft.cli.recover.progress import file_progress, in_all
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.offline.loss import LossPlan
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.status import MachineStatus, RunStatus, run_status
from swift_ft.units import counted, format_bytes, format_seconds, in_spans


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the store that the script gave to swift_ft.Session")


def _run(args: argparse.Namespace) -> ExitCode:
    with file_progress("reading the run") as on_file:
        status = run_status(open_run_store(args.store), on_file=on_file)
    if args.json:
        print_json(status.to_dict())
    else:
        _print(status)
    return ExitCode.FINDINGS if status.problems else ExitCode.OK


def _print(status: RunStatus) -> None:
    console = Console(highlight=False, markup=False)
    for line in _lines(status):
        console.print(line, soft_wrap=True)
    console.print(_table(status))
    for problem in status.problems:
        console.print(f"problem: {problem}", soft_wrap=True)


def _lines(status: RunStatus) -> Iterator[str]:
    machines, workers = status.topology["machines"], status.topology["workers"]
    size = f"{counted(machines, 'machine')} with {counted(workers, 'worker')} each"
    yield f"run {status.run_id} in {status.url}: {size}"
    if status.earlier:
        yield f"continues {', '.join(status.earlier)}"
    yield _life(status)
    if status.checkpoints:
        age = (
            f", {format_seconds(status.checkpoint_age_s)} ago" if status.checkpoint_age_s is not None else ""
        )
        every = f"; one is due every {status.checkpoint_every} iterations" if status.checkpoint_every else ""
        kept = ", ".join(map(str, status.checkpoints))
        yield f"last committed checkpoint: iteration {status.checkpoints[-1]}{age} (there are {kept}){every}"
    else:
        yield "no committed checkpoint"
    yield f"newest iteration that the store knows of: {status.iteration}"
    limit = status.log_budget_bytes
    budget = f"at most {format_bytes(limit)} for each worker" if limit is not None else "no limit is set"
    yield f"checkpoints: {format_bytes(status.checkpoint_bytes)}"
    yield f"logs: {format_bytes(status.log_bytes)}, {budget}"
    yield from status.audits
    yield from status.wrong
    yield from filter(None, (status.worlds, status.smaller))
    if status.spares:
        yield f"machines that wait: {', '.join(status.spares)}"


def _life(status: RunStatus) -> str:
    after = f"{counted(status.recoveries, 'recovery', 'recoveries')} so far"
    seen = (
        f"the last sign of life was {format_seconds(status.sign_of_life_s)} ago"
        if (status.sign_of_life_s is not None)
        else "there is no sign of life"
    )
    if status.ok is not None:
        return f"ended {'well' if status.ok else 'with an error'} ({status.reason}); {after}; {seen}"
    return f"no end is known: {status.phase} in generation {status.generation}, {after}; {seen}"


def _table(status: RunStatus) -> Table:
    table = Table()
    for column in ("machine", "name", "log since the checkpoint", "gaps", "log"):
        table.add_column(column)
    if any(machine.loss is not None for machine in status.machines):
        for column in ("if lost now", "computed again, and back", "because"):
            table.add_column(column)
    for machine in status.machines:
        table.add_row(*_row(machine))
    return table


def _row(machine: MachineStatus) -> Iterator[str]:
    yield str(machine.machine)
    yield f"{machine.name}{f' ({machine.address})' if machine.address else ''}" or "none"
    yield "\n".join(in_spans(log.coverage.spans) or "-" for log in machine.logs)
    yield "\n".join(in_spans(log.coverage.gaps) or "-" for log in machine.logs)
    yield format_bytes(sum(log.size_bytes for log in machine.logs))
    if machine.loss is not None:
        yield machine.way
        yield _again(machine.loss)
        yield machine.loss.reason


def _again(loss: LossPlan) -> str:
    iterations = counted(loss.iterations_again, "iteration")
    return iterations if loss.estimate is None else f"{iterations}, {in_all(loss.estimate)}"


VERB = Verb(
    description="Show the newest run of a store: whether it lives, its checkpoints and logs, and for each "
    "machine how it would be recovered if it were lost now. Nothing is measured from outside: the times are "
    "those that its journal and its files show, and the seconds are until all workers are back where they "
    "were: swift-recover plan shows their parts, and which of them are assumed.",
    declare=_declare,
    run=_run,
)
