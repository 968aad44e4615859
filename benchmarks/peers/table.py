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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    machine,
    of_repetitions,
    record,
    table,
    target_table,
)
from benchmarks.peers.cells import KILLED, MACHINES, MODEL, Case, Failure, Outcome, System, run
from benchmarks.peers.lines import changed_lines
from benchmarks.peers.systems import PLAIN, SWIFT, SYSTEMS, TUNED_TORCHFT
from examples.commands import CommandError

SCRIPTS = Path(__file__).parent / "scripts"
LAYOUTS = {"data": "four replicas", "pipeline": "a pipeline of four (1F1B)"}
FAILURES: dict[Failure, str] = {
    "spare": "a machine is lost, a spare waits",
    "again": "a machine is lost, there is no spare: it is started again at once",
    "process": "a worker's process is killed alone",
}
STEP, OF_TUNED = 1.01, 0.5


@dataclass(frozen=True)
class Cell:
    """One run, or why there is none.

    Attributes:
        repetition: from 1.
        case: what was trained, and what died.
        system: its name.
        outcome: what came of it; None if it failed.
        error: the first line of what it said then.
        load: the host's load average when it began.
    """

    repetition: int
    case: Case
    system: str
    outcome: Outcome | None
    error: str = ""
    load: float = 0.0

    @property
    def key(self) -> tuple[int, Case, str]:
        """What tells it from all others."""
        return self.repetition, self.case, self.system

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """Reads what ``to_json`` wrote."""
        outcome = data["outcome"]
        if outcome is not None:
            digests = {int(at): {int(r): d for r, d in of.items()} for at, of in outcome["digests"].items()}
            outcome = Outcome(**outcome | {"digests": digests})
        return cls(
            data["repetition"], Case(**data["case"]), data["system"], outcome, data["error"], data["load"]
        )


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
    for case, system, repetition in turns(cases, chosen, args.repetitions):
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
        record("peers", body, args, beside=args.beside)
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


# -------------------------------------------------------------------------------------------------- numbers


def outcomes(cells: Sequence[Cell], case: Case, system: str) -> list[Outcome]:
    """What came of a system's runs of a case."""
    return [one.outcome for one in cells if one.outcome and (one.case, one.system) == (case, system)]


def _pairs(cells: Sequence[Cell], case: Case, system: str) -> Iterator[tuple[Outcome, Outcome]]:
    """Of each repetition, a system's run and plain PyTorch's."""
    for one in cells:
        if one.outcome and (one.case, one.system) == (case, system):
            for other in cells:
                if other.outcome and other.key == (one.repetition, case, PLAIN.name):
                    yield one.outcome, other.outcome


def equal(outcome: Outcome, plain: Outcome, last: int) -> bool:
    """Whether all workers that were compared have the weights of an undisturbed run, bit for bit."""
    expected = plain.digests[last]
    found = outcome.digests.get(last, {})
    return bool(found) and all(digest == expected.get(rank) for rank, digest in found.items())


def step_ratios(cells: Sequence[Cell], case: Case, system: str) -> list[float]:
    """A failure-free step against plain PyTorch's, in runs that took turns."""
    return [one.step_s / plain.step_s for one, plain in _pairs(cells, case, system)]


READ: dict[str, tuple[Callable[[Outcome], float | None], str, int]] = {
    "kill to the first survivor out of the interrupted iteration": (lambda one: one.detected_s, " s", 2),
    "kill to the end of the next new iteration": (lambda one: one.new_s, " s", 2),
    "kill to the same with all four workers": (lambda one: one.full_s, " s", 2),
    "completed iterations that all repeat": (lambda one: one.lost, "", 0),
    "a checkpoint takes longer than three steps by": (lambda one: one.checkpoint_s, " s", 2),
    "a worker's most memory": (lambda one: one.peak_mb, " MiB", 0),
}
NEW = "kill to the end of the next new iteration"


def judge(cells: Sequence[Cell], cases: Sequence[Case]) -> list[Target]:
    """What is asked of swift_ft. Of several cases the worst counts."""
    targets = []
    for layout in dict.fromkeys(case.layout for case in cases):
        some = [case for case in cases if case.layout == layout]
        steps = [ratio for case in some for ratio in step_ratios(cells, case, SWIFT.name)]
        if steps:
            found = Summary.of(steps)
            name = f"{LAYOUTS[layout]}: failure-free step / plain PyTorch's"
            targets.append(Target(name, f"<= {STEP}", found.text("", 2), found.median <= STEP))
        best = [ratio for case in some if (ratio := _beside(cells, case, _others(cells, case))) is not None]
        if best:
            name = f"{LAYOUTS[layout]}: {NEW}, of the fastest peer's, in the worst row"
            targets.append(Target(name, "< 1", f"{max(best):.3f}", max(best) < 1))
        tuned = [ratio for case in some if (ratio := _beside(cells, case, [TUNED_TORCHFT.name])) is not None]
        if tuned:
            name = f"{LAYOUTS[layout]}: the same, of {TUNED_TORCHFT.name}'s"
            targets.append(Target(name, f"<= {OF_TUNED}", f"{max(tuned):.3f}", max(tuned) <= OF_TUNED))
    return targets


def _others(cells: Sequence[Cell], case: Case) -> list[str]:
    return list({one.system for one in cells if one.case == case} - {PLAIN.name, SWIFT.name})


def _beside(cells: Sequence[Cell], case: Case, others: Sequence[str]) -> float | None:
    """Ours against the fastest of others, by medians; None if one of them has no run."""
    ours = [one.new_s for one in outcomes(cells, case, SWIFT.name) if one.new_s is not None]
    theirs = [
        median(times)
        for name in others
        if (times := [one.new_s for one in outcomes(cells, case, name) if one.new_s is not None])
    ]
    return median(ours) / min(theirs) if ours and theirs else None


# ------------------------------------------------------------------------------------------------- reporting


def report(
    cells: Sequence[Cell],
    cases: Sequence[Case],
    systems: Sequence[System],
    targets: Sequence[Target],
    repetitions: int,
) -> str:
    """All results as Markdown."""
    parts = [
        f"{_intro(repetitions)}{_loads(cells)}",
        _systems_table(systems, list(dict.fromkeys(one.layout for one in cases))),
    ]
    for layout in dict.fromkeys(case.layout for case in cases):
        for failure, words in FAILURES.items():
            some = [case for case in cases if (case.layout, case.failure) == (layout, failure)]
            if some:
                parts += [f"**{LAYOUTS[layout].capitalize()}; {words}**", _table(cells, some, systems)]
    return "\n\n".join([*parts, target_table(targets)])


def _intro(repetitions: int) -> str:
    return (
        f"{MACHINES} machines of one host with a worker and a launcher of their own each train the GPT of "
        f"`examples/` (`{' '.join(MODEL)}`, gloo, AdamW). The worker of rank {KILLED} gets SIGKILL in the "
        "middle of a backward; of a machine all processes get it at once. There is one checkpoint before the "
        "kill, so many completed iterations earlier as the row says, and nobody saves between them. Plain "
        "PyTorch without a failure runs in turns with all others, and gives the weights and the step to "
        "compare with; the step is that of worker 0 before the kill, outside of checkpoints. All processes "
        "share the host's cores: a spare that computes along costs all others time here. Memory is the most "
        "that a worker had resident, with pages that it shares with the process it was forked from. "
        f"{of_repetitions(repetitions)}."
    )


def _loads(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    found = Summary.of([one.load for one in cells])
    return f" The host's load average when a run began: {found.text('', 1)}."


def _systems_table(systems: Sequence[System], layouts: Sequence[str]) -> str:
    head = ["", "here", *(f"lines changed, {LAYOUTS[layout]}" for layout in layouts), "settings"]
    rows = [
        [one.name, one.missing() or "runs", *(_lines_of(one, layout) for layout in layouts), one.settings]
        for one in systems
    ]
    return table(head, rows)


def _lines_of(system: System, layout: str) -> str:
    if layout not in system.scripts:
        return system.cannot.get(layout, "not measured")
    plain, other = ((SCRIPTS / one.scripts[layout]).read_text() for one in (PLAIN, system))
    return str(changed_lines(plain, other))


def _table(cells: Sequence[Cell], cases: Sequence[Case], systems: Sequence[System]) -> str:
    rows = []
    for case in cases:
        at = f", {case.distance} after the checkpoint"
        rows.append([f"step / plain PyTorch's{at}", *(_step(cells, case, one) for one in systems)])
        for words, (read, unit, digits) in READ.items():
            rows.append([f"{words}{at}", *(_figure(cells, case, one, read, unit, digits) for one in systems)])
        rows.append([f"weights equal{at}", *(_equal(cells, case, one) for one in systems)])
    return table(["", *(one.name for one in systems)], rows)


def _step(cells: Sequence[Cell], case: Case, system: System) -> str:
    found = step_ratios(cells, case, system.name)
    return Summary.of(found).text("", 2) if found else ""


def _figure(
    cells: Sequence[Cell],
    case: Case,
    system: System,
    read: Callable[[Outcome], float | None],
    unit: str,
    digits: int,
) -> str:
    runs = outcomes(cells, case, system.name)
    found = [value for one in runs if (value := read(one)) is not None]
    if found:
        return Summary.of(found).text(unit, digits)
    if runs:
        return "never" if read is READ["kill to the same with all four workers"][0] else ""
    return _why_none(cells, case, system) if read is READ[NEW][0] else ""


def _why_none(cells: Sequence[Cell], case: Case, system: System) -> str:
    if (missing := system.missing()) is not None:
        return missing
    if (why := system.why_not(case)) is not None:
        return why
    errors = [one.error for one in cells if (one.case, one.system) == (case, system.name)]
    return f"failed: {errors[0]}" if errors else "not measured"


def _equal(cells: Sequence[Cell], case: Case, system: System) -> str:
    found = [equal(one, plain, case.last) for one, plain in _pairs(cells, case, system.name)]
    if not found:
        return ""
    return "yes" if all(found) else "no" if not any(found) else f"{sum(found)} of {len(found)} runs"


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
