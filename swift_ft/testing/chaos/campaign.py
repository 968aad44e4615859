"""A campaign: one undisturbed run, then many with random faults, each compared with the first bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.plans import Shape, random_plan
from swift_ft.testing.chaos.trial import Outcome, Training, Trial, run_trial


@dataclass(frozen=True, slots=True)
class Campaign:
    """Many trials of one training.

    Attributes:
        training: what is run.
        shape: what faults can strike.
        folder: where runs keep their files. Those of runs that ended identical are deleted.
        seed: of the first plan; the others follow.
        plans: how many.
        parallel: how many runs at a time.
        habits: each plan has habits planted into the script, chosen by its seed. It is compared with an
            undisturbed run with the same ones.
    """

    training: Training
    shape: Shape
    folder: Path
    seed: int
    plans: int
    parallel: int = 1
    habits: bool = False

    def run(self) -> Iterator[Trial]:
        """The disturbed runs, as they end.

        Raises:
            SwiftError: if an undisturbed run fails, or leaves no checkpoint to compare with. One that is
                refused for its habits is an outcome.
        """
        seeds = range(self.seed, self.seed + self.plans)
        chosen = {seed: random_habits(seed) if self.habits else () for seed in seeds}
        with ThreadPoolExecutor(self.parallel) as pool:
            distinct = [*dict.fromkeys(chosen.values())]
            expected = dict(zip(distinct, pool.map(self._undisturbed, distinct), strict=True))
            yield from pool.map(lambda seed: self._disturbed(seed, expected[chosen[seed]]), seeds)

    def _undisturbed(self, habits: tuple[Habit, ...]) -> Trial:
        folder = self._new_folder("-".join(["undisturbed", *habits]))
        trial = run_trial(replace(self.training, habits=habits), folder)
        refused = habits and trial.outcome == Outcome.ENDED  # by name: an answer to a habit
        if trial.outcome != Outcome.IDENTICAL and not refused:
            why = trial.reason or "it left no checkpoint in the store that --store names"
            raise SwiftError(
                f"The undisturbed run ended as {trial.outcome} ({why}): see {trial.folder}/output.log."
            )
        return trial

    def _disturbed(self, seed: int, undisturbed: Trial) -> Trial:
        if undisturbed.outcome == Outcome.ENDED:
            return undisturbed
        plan, training = random_plan(self.shape, seed), replace(self.training, habits=undisturbed.habits)
        trial = run_trial(training, self._new_folder(f"seed-{seed}"), plan, undisturbed.state)
        if trial.outcome == Outcome.IDENTICAL:
            shutil.rmtree(trial.folder, ignore_errors=True)
        return trial

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
