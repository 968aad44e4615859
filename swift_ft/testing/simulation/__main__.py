"""The command line of the simulation: many seeds with a summary, or one seed with its journal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from swift_ft.recovery.events import Event
from swift_ft.recovery.job_state import Phase
from swift_ft.testing.scenario.events import line_of
from swift_ft.testing.simulation.seeds import JobKind, simulate
from swift_ft.testing.simulation.store import Violation

_SHOWN_VIOLATIONS = 10
_AT_ONCE = 10
"""Seeds that a process runs before it says how they ended."""

_Some = tuple[Counter[str], dict[int, str], float]


@dataclass(slots=True)
class Summary:
    """The events of many runs, counted.

    Attributes:
        seen: how often each kind of thing happened.
        violations: messages, by seed.
        cpu_s: CPU seconds.
    """

    job: str
    shape: str
    first_seed: int
    seeds: int
    seen: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    cpu_s: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 1 after a violation."""
    args = parser().parse_args(argv)
    if args.seed is not None:
        return _show_seed(args)
    summary = _run_seeds(args)
    if args.json:
        print(json.dumps({**asdict(summary), "seen": dict(sorted(summary.seen.items()))}))
    else:
        _print_summary(summary)
    return 1 if summary.violations else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m swift_ft.testing.simulation",
        description="Drive the recovery protocol through seeded orders of failures, and check that nothing "
        "happens that must never happen. A seed is the same run every time.",
    )
    kinds = ", ".join(JobKind)
    parser.add_argument(
        "--job", type=JobKind, default=JobKind.PIPELINE, metavar="KIND", help=f"{kinds} (default: pipeline)"
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        default=(4, 1),
        metavar="MxW",
        help="machines x workers on each (default: 4x1)",
    )
    parser.add_argument(
        "--seeds", type=_count, default=1000, metavar="N", help="number of seeds to run (default: 1000)"
    )
    parser.add_argument(
        "--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)"
    )
    parser.add_argument(
        "--heads",
        action="store_true",
        help="let events travel through heads, which merge, stall and die, as in large jobs",
    )
    parser.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="processes that share the seeds (default: 1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="run this seed only, and print its journal")
    parser.add_argument(
        "--scenario",
        type=Path,
        metavar="FILE",
        help="with --seed: write its journal there as a scenario, to which expectations can be added",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _shape(text: str) -> tuple[int, int]:
    machines, _, workers = text.partition("x")
    if not (machines.isdecimal() and workers.isdecimal() and int(machines) > 1 and int(workers) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write machines x workers, for example 4x1")
    return int(machines), int(workers)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _show_seed(args: argparse.Namespace) -> int:
    """Print the journal of one seed and how it ended.

    As a scenario it is the order of events that has failed, and the protocol's answers to it. A scenario has
    no workers: what they computed, where that is what was wrong, is in the comment above it alone.
    """
    journal: list[str] = []
    events: list[Event] = []
    ok = True
    result: dict[str, Any]
    try:
        trace = journal.append if args.json else print
        outcome = simulate(args.job, args.seed, *args.shape, heads=args.heads, trace=trace, journal=events)
        result = {**asdict(outcome), "seen": dict(sorted(outcome.seen.items()))}
        text = f"{'finished' if outcome.ok else 'gave up'}: {outcome.reason} ({outcome.events} events)"
    except Violation as violation:
        ok, text = False, str(violation)
        result = {"violation": text}
    if args.scenario is not None:
        said = "".join(f"# {line}\n" for line in text.splitlines())
        args.scenario.write_text(said + "".join(f"{line_of(event)}\n" for event in events))
    print(json.dumps({"seed": args.seed, "journal": journal, **result}) if args.json else text)
    return 0 if ok else 1


def _run_seeds(args: argparse.Namespace) -> Summary:
    machines, workers = args.shape
    summary = Summary(args.job.value, f"{machines}x{workers}", args.first_seed, args.seeds)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    one = partial(_run_some, args.job, machines, workers, heads=args.heads)
    some = [seeds[at : at + _AT_ONCE] for at in range(0, len(seeds), _AT_ONCE)]
    with ProcessPoolExecutor(args.jobs) if args.jobs > 1 else nullcontext() as pool:
        ended = pool.map(one, some) if pool is not None else map(one, some)
        for seen, violations, cpu_s in _with_progress(ended, len(some)):
            summary.seen += seen
            summary.violations |= violations
            summary.cpu_s += cpu_s
    summary.cpu_s = round(summary.cpu_s, 3)
    return summary


def _run_some(job: JobKind, machines: int, workers: int, seeds: range, *, heads: bool) -> _Some:
    """Findings of some seeds: all that was seen, their violations, and CPU seconds."""
    seen, violations, begin = Counter[str](), dict[int, str](), time.process_time()
    for seed in seeds:
        try:
            seen += simulate(job, seed, machines, workers, heads=heads).seen
        except Violation as violation:
            violations[seed] = str(violation)
    return seen, violations, time.process_time() - begin


def _with_progress(ended: Iterable[_Some], count: int) -> Iterator[_Some]:
    """Report progress on stderr: as a bar on a terminal, otherwise as a line for each tenth."""
    if sys.stderr.isatty():
        yield from track(ended, "seeds", count, console=Console(stderr=True), transient=True)
        return
    for done, some in enumerate(ended, 1):
        yield some
        if done * 10 // count > (done - 1) * 10 // count:
            print(f"{done * 100 // count} % of the seeds", file=sys.stderr, flush=True)


def _print_summary(summary: Summary) -> None:
    console = Console()
    console.print(_faults_table(summary.seen))
    console.print(_counts_table(summary.seen))
    for message in list(summary.violations.values())[:_SHOWN_VIOLATIONS]:
        console.print(f"VIOLATION in {message}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{summary.seeds} seeds of {summary.job} {summary.shape} from {summary.first_seed}: "
        f"{summary.seen['finished']} finished, {summary.seen['gave up']} gave up for a good reason, "
        f"{len(summary.violations)} violations; {summary.cpu_s:.1f} s of CPU time",
        highlight=False,
        soft_wrap=True,
    )


def _faults_table(seen: Counter[str]) -> Table:
    """The number of times that each fault struck in each phase."""
    phases = [phase.value for phase in Phase]
    table = Table("fault", *phases, title="Faults by phase")
    counts = {
        tuple(key.removeprefix("fault: ").split(" while ")): n
        for key, n in seen.items()
        if key.startswith("fault: ")
    }
    for fault in sorted({fault for fault, _ in counts}):
        table.add_row(fault, *(str(counts.get((fault, phase), 0)) for phase in phases))
    return table


def _counts_table(seen: Counter[str]) -> Table:
    """A table of how often all but the faults happened."""
    table = Table("what", "times", title="Seen")
    for key in sorted(seen):
        if not key.startswith("fault: "):
            table.add_row(key, str(seen[key]))
    return table


if __name__ == "__main__":
    sys.exit(main())
