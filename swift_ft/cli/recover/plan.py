"""``swift-recover plan``: what would happen if machines died now."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from swift_ft.cli.recover.progress import file_progress, in_all
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.errors import UsageError
from swift_ft.offline.archive import read_journal
from swift_ft.offline.loss import LossPlan, LossPlanner, Outcome, WorkerPart
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.status import newest_iteration
from swift_ft.recovery.job_state import Verdict
from swift_ft.units import format_seconds


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the store that the script gave to swift_ft.Session")
    parser.add_argument(
        "--fail", required=True, type=_slots, metavar="N[,N]", help="machines that die together, from 0"
    )
    parser.add_argument(
        "--no-spare", action="store_true", help="assume that no machine waits, and that none joins"
    )
    parser.add_argument(
        "--iteration",
        type=_iteration,
        metavar="N",
        help="the iteration in which they die (default: the newest one that the store knows of)",
    )


def _slots(text: str) -> list[int]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of machines, such as 3 or 3,4")
    return sorted({int(part) for part in text.split(",")})


def _iteration(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of an iteration")
    return int(text)


def _run(args: argparse.Namespace) -> ExitCode:
    run = open_run_store(args.store)
    with file_progress("reading the run") as on_file:
        journal = read_journal(run.store, run.run_id, on_file=on_file)
    end, newest = journal.verdict, newest_iteration(run, journal)
    iteration = newest if args.iteration is None else args.iteration
    # A run that goes on may be ahead of its archive, by an interval of checkpoints at most.
    ahead = 0 if end is not None else run.settings.get("checkpoint_every") or newest
    if iteration > newest + ahead:
        raise UsageError(
            f"the run has not come to iteration {iteration}: the newest that its store knows of is {newest}"
        )
    plan = LossPlanner(journal, run.profiles()).plan(args.fail, iteration=iteration, spare=not args.no_spare)
    if args.json:
        ended = None if end is None else {"ok": end.ok, "reason": end.reason}
        print_json({**plan.to_dict(), "ended": ended, "problems": journal.problems})
    else:
        _print(plan, end, journal.problems)
    return ExitCode.OK if plan.outcome == Outcome.RECOVERS else ExitCode.FINDINGS


def _print(plan: LossPlan, end: Verdict | None, problems: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False)
    for line in (*_end(end), *_lines(plan)):
        console.print(line, soft_wrap=True)
    if plan.workers:
        table = Table()
        for column in ("worker", "machine", "does", "then"):
            table.add_column(column)
        for part in plan.workers:
            table.add_row(str(part.rank), _machine(part), _does(part), f"goes on at iteration {plan.resume}")
        console.print(table)
    for problem in problems:
        console.print(f"problem: {problem}", soft_wrap=True)


def _end(end: Verdict | None) -> Iterator[str]:
    if end is not None:
        how = "well" if end.ok else "with an error"
        yield f"the run has ended {how} ({end.reason}): it has no machine left to lose. Before its end:"


def _lines(plan: LossPlan) -> Iterator[str]:
    lost = ", ".join(map(str, plan.failed))
    many = len(plan.failed) > 1
    die = "die" if many else "dies"
    yield f"run {plan.run_id}: machine{'s' * many} {lost} {die} in iteration {plan.iteration}"
    ago = format_seconds(max(0.0, time.time() - plan.as_of))
    yield f"this is for the last moment in which all workers trained: {ago} ago, as far as is archived"
    committed = "none" if plan.committed is None else f"iteration {plan.committed}"
    yield f"last committed checkpoint: {committed}"
    if plan.in_memory is not None:
        yield f"newest memory checkpoint: iteration {plan.in_memory}"
    for slot, machine in plan.spares.items():
        yield f"the spare {machine} takes the place of machine {slot}"
    for slot in plan.joining:
        then = "all others wait until a machine joins"
        if slot in plan.hosts:
            then = f"if none joins within --elastic-wait, machine {plan.hosts[slot]} runs its workers, too"
        yield f"no spare waits to take the place of machine {slot}: {then}"
    match plan.outcome:
        case Outcome.WAITS:
            yield (
                "the run stands still. Survivors keep their state until --join-timeout; then it ends, and "
                "--resume continues from the checkpoint"
            )
        case Outcome.ENDS:
            yield f"the run ends: {plan.reason}"
        case Outcome.RESTARTS:
            yield f"all processes start again, from the beginning: {plan.reason}"
        case Outcome.RECOVERS:
            yield from _recovery(plan)


def _recovery(plan: LossPlan) -> Iterator[str]:
    yield f"the run recovers by {plan.mode}{f': {plan.reason}' if plan.reason else ''}"
    yield "no layers move: each machine that joins gets the stages of the one that it replaces"
    again = f"{plan.iterations_again} iteration{'s' * (plan.iterations_again != 1)}"
    yield f"computed again: {again}"
    if plan.estimate is None:
        return
    for part in plan.estimate.parts:
        takes = "?" if part.seconds is None else format_seconds(part.seconds)
        yield f"  {part.what}: {takes} ({part.source})"
    yield f"all in all {in_all(plan.estimate)}, until all are back in iteration {plan.iteration}"


def _machine(part: WorkerPart) -> str:
    return f"{part.machine} (replaced)" if part.lost else str(part.machine)


def _loads(part: WorkerPart) -> str:
    if part.holder is None:
        return f"loads the checkpoint of iteration {part.loads}"
    if part.holder == part.rank:
        return f"loads its own copy of iteration {part.loads}"
    return f"gets its copy of iteration {part.loads} from worker {part.holder}"


def _does(part: WorkerPart) -> str:
    done = []
    if part.loads is not None:
        done.append(_loads(part))
    if part.replays:
        done.append(f"replays {part.replays} iterations from logs")
    if part.receives_from is not None:
        done.append(f"receives its state from worker {part.receives_from}")
    if part.helps:
        done.append(f"helps worker{'s' * (len(part.helps) > 1)} {', '.join(map(str, part.helps))}")
    if part.repeats:
        done.append(f"trains {part.repeats} iterations again")
    return ", ".join(done) or "keeps its state and waits"


VERB = Verb(
    description="Show what the run would do if machines died now: who takes their places, who replays and "
    "who helps, and what is computed again. The run's own protocol makes this plan, from the archived "
    "journal. Of a run that has ended, it is the plan for the time before its workers were done.",
    declare=_declare,
    run=_run,
)
