"""swift_ft beside its peers: the same training, the same kill, one launcher for each machine, all in turns.

    python -m benchmarks.peers.table

Four workers on four "machines" of this host train the GPT of the examples, as replicas or as a pipeline. Some
iterations after a checkpoint a worker gets SIGKILL in the middle of its backward, with its launcher and all
else of its machine, or alone. What it takes until training goes on, what is lost, and whether the weights are
those of an undisturbed run comes from what all workers wrote down; plain PyTorch without a failure runs in
turns with them. A peer that is not installed, or cannot do a case, says so in its place. Each run takes half
a minute on two idle cores, and all runs of a repetition an hour; --keep goes on where it was.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.lib.results import Target, argument_parser, machine, record
from benchmarks.peers.cells import Case, Failure, Outcome, System, run
from benchmarks.peers.report import FAILURES, LAYOUTS, Cell, judge, report
from benchmarks.peers.systems import PLAIN, SYSTEMS
from examples.commands import CommandError


def main() -> int:
    """Runs all cells in turns and prints the tables."""
    parser = argument_parser(__doc__, repetitions=1)
    add = parser.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="default: all")
    add("--distances", type=int, nargs="+", default=[1, 25, 49], metavar="N", help="default: 1 25 49")
    add("--failures", nargs="+", choices=get_args(Failure), default=[*FAILURES], help="default: all")
    add("--systems", nargs="+", metavar="NAME", help="beside plain PyTorch; default: all")
    add("--deadline", type=float, default=240.0, metavar="S", help="for one run, default: %(default)s")
    add("--keep", type=Path, metavar="FILE", help="append each run to it, and repeat none that it holds")
    add("--no-more", action="store_true", help="run nothing: the tables of what --keep holds")
    add("--beside", default="", metavar="WORDS", help="what else the host does meanwhile, for the record")
    args = parser.parse_args()
    chosen = [one for one in SYSTEMS if not args.systems or one.name in args.systems]
    if args.systems and (unknown := set(args.systems) - {one.name for one in SYSTEMS}):
        known = ", ".join(one.name for one in SYSTEMS)
        parser.error(f"no system is called {', '.join(sorted(unknown))}: choose from {known}")
    middle = args.distances[len(args.distances) // 2]
    cases = [
        Case(layout, failure, distance)
        for layout in args.layouts
        for failure in args.failures
        # How far the checkpoint is matters the same with a spare and without: one distance is enough there.
        for distance in (args.distances if failure == "spare" else [middle])
    ]
    cases.sort(key=lambda case: case.distance != middle)  # what a run that is cut off has, too
    cells = [*_kept(args.keep)]
    if args.no_more:
        held = {one.case for one in cells}
        cases = [case for case in cases if case in held]
    for case, system, repetition in () if args.no_more else turns(cases, chosen, args.repetitions):
        if (repetition, case, system.name) in {one.key for one in cells}:
            continue
        cells.append(cell := measure(system, case, repetition, args.deadline))
        said = cell.error if cell.outcome is None else _short(cell.outcome)
        print(f"# {repetition}, {case}, {system.name}: {said}", file=sys.stderr, flush=True)
        if args.keep:
            with args.keep.open("a") as file:
                file.write(json.dumps(cell.to_json()) + "\n")
    targets = judge(cells, cases)
    body = report(cells, cases, chosen, targets, args.repetitions)
    print(json.dumps(as_json(cells, targets), indent=1) if args.json else body)
    if args.record:
        # The page of all systems shows no run of some of them.
        record("peers-some" if args.systems else "peers", body, args, beside=args.beside)
    return 0


def turns(
    cases: Sequence[Case], systems: Sequence[System], repetitions: int
) -> Iterator[tuple[Case, System, int]]:
    """All runs in their order: of each case all systems, another one first each time."""
    number = 0
    for repetition in range(1, repetitions + 1):
        for case in cases:
            able = [one for one in systems if one.missing() is None and one.why_not(case) is None]
            contenders = [PLAIN, *able]
            turn = number % len(contenders)
            number += 1
            for system in contenders[turn:] + contenders[:turn]:
                yield case, system, repetition


def measure(system: System, case: Case, repetition: int, deadline_s: float) -> Cell:
    """Runs one cell. A failure is a result, too."""
    load = os.getloadavg()[0]
    trained = Case(case.layout, None, case.distance) if system is PLAIN else case
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        try:
            outcome = run(system, trained, Path(name) / "run", [case.last], deadline_s)
        except CommandError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            print(f"# {error}", file=sys.stderr, flush=True)
            return Cell(repetition, case, system.name, None, lines[0] if lines else "failed", load)
    return Cell(repetition, case, system.name, outcome, load=load)


def _kept(file: Path | None) -> Iterator[Cell]:
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            yield Cell.from_json(json.loads(line))


def _short(outcome: Outcome) -> str:
    facts = {name: value for name, value in asdict(outcome).items() if isinstance(value, float | int)}
    return ", ".join(f"{name} {value:.3f}" for name, value in facts.items())


def as_json(cells: Sequence[Cell], targets: Sequence[Target]) -> dict[str, Any]:
    """All results as JSON."""
    return {
        "machine": machine(),
        "installed": {
            name: _version(name) for name in ("torch", "torchft", "nvidia-resiliency-ext", "dlrover")
        },
        "cells": [one.to_json() for one in cells],
        "targets": [target.to_dict() for target in targets],
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
