"""A campaign: one undisturbed run, then many with random faults, each compared with the first bit for bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from swift_ft.errors import SwiftError
from swift_ft.faults import Action, Fault, Target
from swift_ft.faults.failpoints import Point
from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.trial import Outcome, Training, Trial, run_trial

_T = TypeVar("_T")

_IN_A_STEP = (Point.FORWARD, Point.BACKWARD, Point.OPTIMIZER, Point.BETWEEN)
_OF_REPLICAS = (Point.REDUCE, Point.REDUCING, Point.REDUCED, Point.UPDATE)
_OF_CHECKPOINTS = (Point.CHECKPOINT, Point.COMMIT)
_OF_COPIES = (Point.COPY,)
_IN_A_RECOVERY = (Point.LEAVE, Point.REPORT, Point.JOIN, Point.LOAD, Point.TRANSFER, Point.REPLAY, Point.HELP)

_ACTIONS = {Action.KILL: 8, Action.STOP: 1, Action.BREAK: 1}
_TARGETS = {Target.MACHINE: 3, Target.WORKER: 1, Target.AGENT: 1}
_POINTS = {_IN_A_STEP: 4, _OF_REPLICAS: 2, _OF_CHECKPOINTS: 1, _IN_A_RECOVERY: 3}
"""The weight with which each is drawn, relative to the others."""
_WITH_COPIES = {**_POINTS, _OF_COPIES: 2}


@dataclass(frozen=True, slots=True)
class Campaign:
    """Many trials of one training.

    Attributes:
        training: what is run.
        shape: what faults can strike.
        folder: where runs keep their files. Those of runs that ended identical, or that no fault struck, are
            deleted.
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
        if trial.outcome in (Outcome.IDENTICAL, Outcome.NOT_STRUCK):
            shutil.rmtree(trial.folder, ignore_errors=True)
        return trial

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a run, as far as it says what faults can strike.

    Attributes:
        machines: number of machines.
        workers: number of workers on each.
        iterations: that the script runs.
        microbatches: of a pipeline; 1 without one.
        most: the largest number of faults in a plan.
        copies: the script has memory checkpoints.
    """

    machines: int
    workers: int
    iterations: int
    microbatches: int = 1
    most: int = 3
    copies: bool = False


def random_plan(shape: Shape, seed: int) -> tuple[Fault, ...]:
    """One to ``shape.most`` faults. Faults of a recovery do not strike unless an earlier one causes it."""
    draw = random.Random(seed)
    points = _IN_A_STEP + _OF_REPLICAS + _OF_CHECKPOINTS + _OF_COPIES * shape.copies
    first = _random_fault(shape, draw, points)
    more = draw.randint(0, shape.most - 1)
    kinds = _WITH_COPIES if shape.copies else _POINTS
    return (first, *(_random_fault(shape, draw, _choose(draw, kinds)) for _ in range(more)))


def _random_fault(shape: Shape, draw: random.Random, points: tuple[Point, ...]) -> Fault:
    action = _choose(draw, _ACTIONS)
    point = draw.choice(points)
    target = Target.WORKER if action == Action.BREAK else _choose(draw, _TARGETS)
    of_a_microbatch = point in (Point.FORWARD, Point.BACKWARD) and shape.microbatches > 1
    return Fault(
        action,
        target,
        draw.randrange(shape.machines * (shape.workers if target == Target.WORKER else 1)),
        draw.randrange(shape.iterations),
        point,
        microbatch=draw.randrange(shape.microbatches) if of_a_microbatch else None,
    )


def _choose(draw: random.Random, weights: dict[_T, int]) -> _T:
    (chosen,) = draw.choices(list(weights), list(weights.values()))
    return chosen
