"""A campaign: one undisturbed run, then many with random faults, each compared with the first bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.plans import Shape, random_plan
from swift_ft.testing.chaos.trial import Outcome, Training, Trial, run_trial

__all__ = ["Campaign"]


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
    """

    training: Training
    shape: Shape
    folder: Path
    seed: int
    plans: int
    parallel: int = 1

    def run(self) -> Iterator[Trial]:
        """The disturbed runs, as they end.

        Raises:
            SwiftError: if the undisturbed run fails, or leaves no checkpoint to compare with.
        """
        expected = self._undisturbed()
        with ThreadPoolExecutor(self.parallel) as pool:
            seeds = range(self.seed, self.seed + self.plans)
            yield from pool.map(lambda seed: self._disturbed(seed, expected), seeds)

    def _undisturbed(self) -> dict[str, str]:
        trial = run_trial(self.training, self._new_folder("undisturbed"))
        if trial.outcome != Outcome.IDENTICAL:
            why = trial.reason or "it left no checkpoint in the store that --store names"
            raise SwiftError(
                f"The undisturbed run ended as {trial.outcome} ({why}): see {trial.folder}/output.log."
            )
        return trial.state

    def _disturbed(self, seed: int, expected: dict[str, str]) -> Trial:
        plan = random_plan(self.shape, seed)
        trial = run_trial(self.training, self._new_folder(f"seed-{seed}"), plan, expected)
        if trial.outcome == Outcome.IDENTICAL:
            shutil.rmtree(trial.folder, ignore_errors=True)
        return trial

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
