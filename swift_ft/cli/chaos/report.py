"""All that ``swift-chaos`` prints: a line for each run, the plans that fail, shrunk, and a summary."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from swift_ft.cli.chaos.repeating import Repeats
from swift_ft.cli.verb import print_json
from swift_ft.errors import SwiftError
from swift_ft.faults import Fault, parse_faults
from swift_ft.testing.chaos.campaign import Campaign, Reference
from swift_ft.testing.chaos.kinds import Kind, kinds
from swift_ft.testing.chaos.launchers import StoppedError
from swift_ft.testing.chaos.run_folder import FOLDER
from swift_ft.testing.chaos.shrinking import fails_alike, shrunk
from swift_ft.testing.chaos.trial import Outcome, Trial
from swift_ft.units import counted, format_seconds, shortened

_WIDTH = max(len(outcome) for outcome in Outcome)
_SHOWN = 5
"""Files outside of the runs' folders that a line names."""


def print_kinds(*, as_json: bool) -> None:
    """Print the kinds of faults, and which this host can have."""
    if as_json:
        print_json([_facts_of_kind(kind) for kind in kinds()])
        return
    table = Table()
    for column in ("fault", "meaning", "here", "--networks", "by default"):
        table.add_column(column)
    for kind in kinds():
        here = f"no: it needs {kind.missing}" if kind.missing else "yes"
        table.add_row(kind.name, kind.meaning, here, *("yes" if one else "" for one in _flags(kind)))
    Console(soft_wrap=True).print(table)


def _flags(kind: Kind) -> tuple[bool, bool]:
    return kind.needs_networks, kind.by_default


def _facts_of_kind(kind: Kind) -> dict[str, Any]:
    names = ("name", "meaning", "missing", "needs_networks", "by_default")
    return {name: getattr(kind, name) for name in names}


class Report:
    """Runs a campaign and says what comes of it.

    Args:
        repeats: commands that repeat a run.
        campaign: what is run.
        as_json: print one object at the end, and nothing before.
        shrinks: runs to find the smallest plan in, for each plan that fails.
    """

    def __init__(self, repeats: Repeats, campaign: Campaign, *, as_json: bool, shrinks: int) -> None:
        self._repeats = repeats
        self._campaign = campaign
        self._as_json = as_json
        self._shrinks = shrinks
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._counts: Counter[Outcome] = Counter()
        self._runs: list[dict[str, Any]] = []
        self._torchrun: dict[str, Any] | None = None
        self._distinct: list[Reference] = []

    def run(self) -> bool:
        """Run it. Whether nothing was found.

        Raises:
            SwiftError: if there is nothing to compare with, or a signal has stopped it. As JSON, all that was
                found until then is printed.
        """
        try:
            good = self._run()
        except SwiftError as error:
            self._print_json(ok=False, error=str(error))
            # Only an error of a run is explained by what that run has left.
            if isinstance(error, StoppedError) and self._all_good():
                self._campaign.forget_all()
            raise
        self._sum_up(good)
        return good

    def _run(self) -> bool:
        references = self._campaign.prepare()
        self._distinct = [*{id(one): one for one in references.values()}.values()]
        for reference in self._distinct:
            self._say(f"{'undisturbed':{_WIDTH}}  {_undisturbed_in_words(reference.trial)}")
        alike = self._like_torchrun(self._distinct[0])
        for (seed, reference), trial in zip(references.items(), self._campaign.run(references), strict=True):
            self._counts[trial.outcome] += 1
            self._tell(trial)
            self._runs.append(facts := _facts(trial))
            if not trial.outcome.is_good:
                facts |= self._failed(trial, seed, reference)
        return alike and self._all_good()

    def _all_good(self) -> bool:
        return all(outcome.is_good for outcome in self._counts.elements())

    def _like_torchrun(self, reference: Reference) -> bool:
        """Whether plain torchrun computes the same, as far as that was asked."""
        likeness = self._campaign.likeness(reference)
        if likeness is None:
            return True
        self._torchrun = {"compared": likeness.compared, "differ": [*likeness.differ]}
        number = counted(likeness.compared, "value or file", "values and files")
        if not likeness.differ:
            self._say(f"{'torchrun':{_WIDTH}}  {number}, all equal to the bit")
            return True
        shown = shortened(likeness.differ, 3)
        self._say(f"{'torchrun':{_WIDTH}}  {len(likeness.differ)} of {number} DIFFER: {shown}")
        return False

    def _tell(self, trial: Trial) -> None:
        name = "" if trial.seed is None else f"seed {trial.seed}: "
        habits = f"({', '.join(trial.habits)}) " if trial.habits else ""
        self._say(f"{trial.outcome:{_WIDTH}}  {name}{habits}{trial.plan}: {_recovered_in_words(trial)}")
        if trial.reason:
            self._more(trial.reason)
        if trial.missed and trial.outcome != Outcome.NOT_STRUCK:
            self._more(f"never struck: {'; '.join(trial.missed)}")

    def _failed(self, trial: Trial, seed: int, reference: Reference) -> dict[str, Any]:
        """Says how to repeat it, and looks for the smallest plan that fails in the same way."""
        repeat = self._repeats.of_plan(trial.plan, seed)
        self._more(f"again: {repeat}")
        if trial.output.exists():
            self._more(f"see {trial.output}")
        if trial.outcome == Outcome.NOT_STRUCK or not self._shrinks:
            return {"repeat": repeat}
        return {"repeat": repeat, **self._shrunk(trial, seed, reference)}

    def _shrunk(self, trial: Trial, seed: int, reference: Reference) -> dict[str, Any]:
        """The smallest plan that fails in the same way, if this one does so when it is run again."""

        def run_again(plan: tuple[Fault, ...]) -> Trial:
            found = reference.compared(plan, f"{trial.folder.name}-again")
            self._campaign.forget(found.folder)
            return found

        def fails_so(found: Trial) -> bool:
            return fails_alike(found, trial, reference.differing)

        plan = parse_faults(trial.plan)
        again = run_again(plan)
        if not fails_so(again):
            self._more(f"not each time: run once more, it ended as {again.outcome}{_why(again)}")
            return {"again": again.outcome.value}
        smallest, runs = shrunk(plan, lambda smaller: fails_so(run_again(smaller)), self._shrinks)
        text = "; ".join(map(str, smallest))
        self._more(f"the smallest plan that fails so, of {counted(runs, 'run')}: {text}")
        command = self._repeats.of_plan(text, seed)
        if smallest != plan:
            self._more(f"again: {command}")
        return {"again": again.outcome.value, "smallest": text, "repeat_smallest": command}

    def _sum_up(self, good: bool) -> None:
        if unstable := self._unstable():
            self._say(f"not compared, because undisturbed runs differ in them: {', '.join(unstable)}")
        if outside := self._outside():
            more = f", ... ({len(outside)} in all)" * (len(outside) > _SHOWN)
            self._say(
                f"not compared, because it was written outside of each run's own folder ({FOLDER}): "
                f"{', '.join(outside[:_SHOWN])}{more}"
            )
        self._print_json(ok=good)
        self._say(", ".join(f"{count} {name}" for name, count in self._counted().items()))
        if good:
            self._campaign.forget_all()

    def _print_json(self, **facts: Any) -> None:
        """All that is known now, in one object."""
        if not self._as_json:
            return
        found = {"counts": self._counted(), "runs": self._runs, "not_compared": self._unstable()}
        found["outside"] = self._outside()
        torchrun = {} if self._torchrun is None else {"torchrun": self._torchrun}
        print_json({**facts, **found, **torchrun})

    def _counted(self) -> dict[str, int]:
        return {outcome.value: self._counts[outcome] for outcome in Outcome if self._counts[outcome]}

    def _unstable(self) -> list[str]:
        return sorted({name for reference in self._distinct for name in reference.unstable.names})

    def _outside(self) -> list[str]:
        return sorted({name for reference in self._distinct for name in reference.outside})

    def _more(self, text: str) -> None:
        self._say(f"{'':{_WIDTH}}  {text}")

    def _say(self, text: str) -> None:
        if not self._as_json:
            self._console.print(text)
            sys.stdout.flush()


def _why(trial: Trial) -> str:
    return f" ({trial.reason})" if trial.reason else ""


def _undisturbed_in_words(trial: Trial) -> str:
    if trial.outcome == Outcome.ENDED:
        return trial.reason
    compared = counted(len(trial.state) - 1, "value or file", "values and files")
    return f"{counted(trial.iterations, 'iteration')} in {format_seconds(trial.wall_s)}, {compared}"


def _recovered_in_words(trial: Trial) -> str:
    """By which ways it recovered, and what that cost."""
    if not trial.ways:
        return f"no recovery, {format_seconds(trial.wall_s)} in all"
    took = f"{format_seconds(trial.recovery_s)}, {counted(trial.lost, 'iteration')} lost"
    return f"{', then '.join(trial.ways)}, {took}, {format_seconds(trial.wall_s)} in all"


def _facts(trial: Trial) -> dict[str, Any]:
    return {
        "seed": trial.seed,
        "plan": trial.plan,
        "habits": [*trial.habits],
        "outcome": trial.outcome.value,
        "reason": trial.reason,
        "exit_code": trial.code,
        "ways": [*trial.ways],
        "recovery_s": round(trial.recovery_s, 3),
        "iterations_lost": trial.lost,
        "seconds": round(trial.wall_s, 3),
        "never_struck": [*trial.missed],
        "folder": str(trial.folder),
    }
