"""The side by side in words and numbers: from what came of its runs to tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.results import Summary, Target, of_repetitions, table, target_table
from benchmarks.peers.cells import KILLED, MACHINES, MODEL, Case, Failure, Outcome, System
from benchmarks.peers.lines import changed_lines
from benchmarks.peers.systems import OURS, PLAIN, SWIFT, TUNED_TORCHFT

SCRIPTS = Path(__file__).parent / "scripts"
LAYOUTS = {"data": "four replicas", "pipeline": "a pipeline of four (1F1B)", "hsdp": "HSDP, 2 x 2"}
FAILURES: dict[Failure, str] = {
    "spare": "a machine is lost, a spare waits",
    "again": "a machine is lost, there is no spare: it is started again at once",
    "process": "a worker's process is killed alone",
}
AT_MOST, OF_TUNED = 1.01, 0.5


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


def cpu_ratios(cells: Sequence[Cell], case: Case, system: str) -> list[float]:
    """The same of worker 0's CPU time, which other work on the host changes less."""
    pairs = [(one.cpu_s, plain.cpu_s) for one, plain in _pairs(cells, case, system)]
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


STEP = "step / plain PyTorch's"
CPU = "CPU time of worker 0 in a step / plain PyTorch's"
NEW = "kill to the end of the next new iteration"
FULL = "kill to the same with all four workers"
REPEATED = "completed iterations that all repeat"
PRICE = "the three steps after a checkpoint take longer by"
MEMORY = "a worker's most memory"
WEIGHTS = "weights equal"
RATIOS = {STEP: step_ratios, CPU: cpu_ratios}
READ: dict[str, tuple[Callable[[Outcome], float | None], str, int]] = {
    "kill to the first survivor out of the interrupted iteration": (lambda one: one.detected_s, " s", 2),
    NEW: (lambda one: one.new_s, " s", 2),
    FULL: (lambda one: one.full_s, " s", 2),
    REPEATED: (lambda one: one.lost, "", 0),
    PRICE: (lambda one: one.checkpoint_s, " s", 2),
    MEMORY: (lambda one: one.peak_mb, " MiB", 0),
}
SHORT = {"spare": "a spare", "again": "no spare", "process": "a process"}
NOT_HERE = "**What does not run on this host**"


def judge(cells: Sequence[Cell], cases: Sequence[Case]) -> list[Target]:
    """What is asked of swift_ft. Of several cases and repetitions the worst counts."""
    targets = []
    for layout in dict.fromkeys(case.layout for case in cases):
        some = [case for case in cases if case.layout == layout]
        for words, ratios in RATIOS.items():
            if found := [ratio for case in some for ratio in ratios(cells, case, SWIFT.name)]:
                name = f"{LAYOUTS[layout]}: {words}, in the worst repetition"
                targets.append(Target(name, f"<= {AT_MOST}", f"{max(found):.2f}", max(found) <= AT_MOST))
        for ours, words in (([SWIFT.name], "swift_ft as it is"), (OURS, "the fastest of its settings")):
            if best := _all_beside(cells, some, ours, lambda case: _others(cells, case)):
                name = f"{LAYOUTS[layout]}: {NEW}, {words} / the fastest other system, in the worst row"
                targets.append(Target(name, "< 1", f"{max(best):.3f}", max(best) < 1))
        if tuned := _all_beside(cells, some, OURS, lambda _: [TUNED_TORCHFT.name]):
            name = f"{LAYOUTS[layout]}: the same, the fastest of its settings / torchft with timeouts of 1 s"
            targets.append(Target(name, f"<= {OF_TUNED}", f"{max(tuned):.3f}", max(tuned) <= OF_TUNED))
    return targets


def _others(cells: Sequence[Cell], case: Case) -> list[str]:
    """All systems that are not ours, with each of their settings."""
    return list({one.system for one in cells if one.case == case} - {PLAIN.name, *OURS})


def _all_beside(
    cells: Sequence[Cell],
    cases: Sequence[Case],
    ours: Sequence[str],
    others: Callable[[Case], Sequence[str]],
) -> list[float]:
    """The fastest of ours against the fastest of others, by medians, in each case in which both have run."""
    pairs = ((_fastest(cells, case, ours), _fastest(cells, case, others(case))) for case in cases)
    return [one / other for one, other in pairs if one is not None and other is not None]


def _fastest(cells: Sequence[Cell], case: Case, names: Sequence[str]) -> float | None:
    found = [[one.new_s for one in outcomes(cells, case, name) if one.new_s is not None] for name in names]
    return min((median(times) for times in found if times), default=None)


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
        f"{_intro(repetitions)}{_loads(cells)}{plain_steps(cells)}",
        _systems_table(systems, list(dict.fromkeys(one.layout for one in cases))),
    ]
    failing = [[one.name, *failure] for one in systems for failure in one.fails.items()]
    if failing:
        parts += [NOT_HERE, table(["", "", "what it says"], failing)]
    for layout in dict.fromkeys(case.layout for case in cases):
        for failure, words in FAILURES.items():
            some = [case for case in cases if (case.layout, case.failure) == (layout, failure)]
            some.sort(key=lambda case: case.distance)
            if some:
                name = LAYOUTS[layout]
                parts += [f"**{name[0].upper()}{name[1:]}; {words}**", _table(cells, some, systems)]
    return "\n\n".join([*parts, target_table(targets)])


def _intro(repetitions: int) -> str:
    return (
        f"{MACHINES} machines of one host with a worker and a launcher of their own each train the GPT of "
        f"`examples/` (`{' '.join(MODEL)}`, gloo, AdamW). The worker of rank {KILLED} gets SIGKILL in the "
        "middle of a backward; of a machine all processes get it at once. There is one checkpoint before the "
        "kill, so many completed iterations earlier as the row says, and nobody saves between them. Plain "
        "PyTorch without a failure runs in turns with all others, and gives the weights and the step to "
        "compare with; the step is that of worker 0 before the kill, outside of checkpoints. Repeated "
        "iterations are those of worker 0; a replacement in swift_ft's pipeline computes its stage of "
        "all since the checkpoint again, alone or with helpers. All processes "
        "share the host's cores: a spare that computes along costs all others time here. Memory is the most "
        "that a worker had resident, with pages that it shares with the process it was forked from. Replicas "
        "that load a checkpoint into a new DDP do not get the same bits: it has other buckets in its first "
        "iteration, and sums in another order (with buckets that stay, they do). "
        f"{of_repetitions(repetitions)}."
    )


def _loads(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    found = Summary.of([one.load for one in cells])
    return f" The host's load average when a run began: {found.text('', 1)}."


def plain_steps(cells: Sequence[Cell]) -> str:
    """How long a step of plain PyTorch takes: what the ratios are of."""
    took: dict[str, list[float]] = {}
    for one in cells:
        if one.outcome and one.system == PLAIN.name:
            took.setdefault(LAYOUTS[one.case.layout], []).append(1000 * one.outcome.step_s)
    said = (f"{layout} {median(found):.0f} ms" for layout, found in took.items())
    return f" Plain PyTorch's step: {', '.join(said)}." if took else ""


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
        for words, ratios in RATIOS.items():
            found = (ratios(cells, case, one.name) for one in systems)
            rows.append([f"{words}{at}", *(Summary.of(one).text("", 2) if one else "" for one in found)])
        for words, (read, unit, digits) in READ.items():
            rows.append([f"{words}{at}", *(_figure(cells, case, one, read, unit, digits) for one in systems)])
        rows.append([f"{WEIGHTS}{at}", *(_equal(cells, case, one) for one in systems)])
    return table(["", *(one.name for one in systems)], rows)


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
        full = read is READ[FULL][0]
        return "" if not full else "never" if system.shrinks else "not in time"
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
