"""A campaign: one undisturbed run, then many with random faults, each compared with the first bit for bit."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from swift_ft.errors import SwiftError, first_line
from swift_ft.faults import Fault
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.judging import judged_again
from swift_ft.testing.chaos.outside import changed, look_at
from swift_ft.testing.chaos.plain_trial import Likeness, likeness, plain_state
from swift_ft.testing.chaos.plans import Shape, random_plan
from swift_ft.testing.chaos.run_folder import is_at_home, is_module
from swift_ft.testing.chaos.running import run_trial
from swift_ft.testing.chaos.trial import Outcome, Training, Trial
from swift_ft.testing.chaos.unstable import FILE, Unstable

_logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Plans of a seed that are tried until a fault strikes."""
_PATIENCE_S = 10.0
"""For a store that is to be deleted, and does not answer."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Many trials of one training.

    Attributes:
        training: what is run.
        shape: what faults can strike.
        folder: where runs keep their files. Those of runs that ended well are deleted.
        seed: of the first plan; the others follow.
        plans: how many.
        parallel: how many runs at a time.
        habits: each plan has habits planted into the script, chosen by its seed. It is compared with an
            undisturbed run with the same ones.
        learns: the points, the iterations and the checkpoints of the shape are those of the undisturbed run.
        given: the only plan; None to draw them.
        torchrun: compare the undisturbed run with plain torchrun.
        adapted: makes the training of one run from that of all, its seed and its plan. The seed is None, and
            the plan empty, where no seed's plan is run. None: all runs are alike.
    """

    training: Training
    shape: Shape
    folder: Path
    seed: int
    plans: int
    parallel: int = 1
    habits: bool = False
    learns: bool = False
    given: tuple[Fault, ...] | None = None
    torchrun: bool = False
    adapted: Callable[[Training, int | None, Sequence[Fault]], Training] | None = None
    _used: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _places: threading.Semaphore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", threading.Semaphore(self.parallel))

    def run_once(
        self,
        training: Training,
        folder: Path,
        plan: Sequence[Fault] = (),
        expected: Trial | None = None,
        seed: int | None = None,
    ) -> Trial:
        """As :func:`run_trial`, when there is a place among the runs that may run at a time.

        The search for a smaller plan runs its plans beside those that follow.
        """
        if self.adapted is not None:
            training = self.adapted(training, seed, plan)
        with self._places:
            return run_trial(training, folder, plan, expected, learns=self.learns, parallel=self.parallel)

    def prepare(self) -> dict[int, Reference]:
        """The undisturbed run that each seed is compared with.

        Raises:
            SwiftError: if one fails, or leaves no checkpoint to compare with. One that is refused for its
                habits is an outcome.
        """
        seeds = range(self.seed, self.seed + self.plans)
        chosen = {seed: random_habits(seed) if self.habits else () for seed in seeds}
        distinct = [*dict.fromkeys(chosen.values())]
        with ThreadPoolExecutor(self.parallel) as pool:
            found = pool.map(lambda habits: Reference(self, habits), distinct)
            references = dict(zip(distinct, found, strict=True))
        return {seed: references[habits] for seed, habits in chosen.items()}

    def run(
        self,
        references: dict[int, Reference] | None = None,
        *,
        until: float = math.inf,
        on_end: Callable[[Trial], None] | None = None,
    ) -> Iterator[Trial]:
        """The disturbed runs, in the order of their seeds.

        Args:
            references: as :meth:`prepare` gives them, of all seeds or of some; None if they are not needed
                afterwards.
            until: no further seed begins after this moment of ``time.monotonic()``.
            on_end: gets each of them as soon as it is over, while an earlier seed's may still run. It is
                called in several threads.

        Raises:
            SwiftError: as for :meth:`prepare`, or if the script is not deterministic.
        """
        there = self.prepare() if references is None else references

        def begun(seed: int) -> Trial | None:
            if time.monotonic() > until:
                return None
            trial = there[seed].disturbed(seed)
            if on_end is not None:
                on_end(trial)
            return trial

        with ThreadPoolExecutor(self.parallel) as pool:
            yield from (trial for trial in pool.map(begun, there) if trial is not None)

    def likeness(self, reference: Reference) -> Likeness | None:
        """The comparison of an undisturbed run with plain torchrun; None if it was not asked for.

        If they differ, another undisturbed run says whether that tells anything.

        Raises:
            SwiftError: as :func:`plain_state` and :func:`likeness`, or if undisturbed runs differ, too.
        """
        if not self.torchrun:
            return None
        workers = self.shape.machines * self.shape.workers
        undisturbed = reference.trial
        with self._places:
            folder = self.new_folder("torchrun")
            plain = plain_state(self.training, folder, workers, undisturbed.iterations)
        found = likeness(plain, undisturbed.state, reference.unstable)
        if found.differ:
            reference.look_again()
            found = likeness(plain, undisturbed.state, reference.unstable)
        return found

    def new_folder(self, name: str) -> Path:
        """An empty folder for a run.

        Each has a name of its own, as it is in the name of the run's store, which may be on another host.
        """
        self._used[name] += 1
        number = self._used[name]
        folder = self.folder / (name if number == 1 else f"{name}-{number}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def forget(self, folder: Path) -> None:
        """Delete all that a run has left: its folder, and its store, which may be elsewhere."""
        if self.training.store:
            _delete_store(self.training.store_of(folder), folder)
        shutil.rmtree(folder, ignore_errors=True)

    def forget_all(self) -> None:
        """The same for all runs that are left, and for what is around them."""
        for folder in [*self.folder.iterdir()]:
            if folder.is_dir():
                self.forget(folder)
        shutil.rmtree(self.folder, ignore_errors=True)


class Reference:
    """An undisturbed run with certain habits, and the runs that are compared with it.

    Args:
        campaign: whose.
        habits: planted into all of them.

    Attributes:
        trial: the undisturbed run.
        outside: files that it has written where all runs write them, so that they are not compared.
    """

    def __init__(self, campaign: Campaign, habits: tuple[Habit, ...]) -> None:
        self._campaign = campaign
        self._training = replace(campaign.training, habits=habits)
        self._lock, self._again = threading.Lock(), False
        shared = look_at(_shared_by_runs(self._training.script), campaign.folder)
        self.trial = self._undisturbed("undisturbed")
        self.outside = changed(shared, campaign.folder)

    def _undisturbed(self, name: str) -> Trial:
        trial = self._to_the_end("-".join([name, *self._training.habits]))
        if self._training.habits and trial.outcome == Outcome.ENDED:  # with a line for its user: an answer
            return trial
        if trial.ways:
            raise SwiftError(
                f"The undisturbed run was disturbed: it recovered ({', then '.join(trial.ways)}), though no "
                "fault struck, so it is no reference. This host may be too busy: run less beside it, or let "
                f"machines be silent for longer (--launch '--heartbeat-timeout 20'). See {trial.output}."
            )
        if trial.outcome != Outcome.IDENTICAL:
            raise SwiftError(
                f"The undisturbed run ended as {trial.outcome} ({trial.reason}): see {trial.output}."
            )
        return trial

    def _to_the_end(self, name: str) -> Trial:
        """An undisturbed run of which the last checkpoint has all iterations: what is saved is compared."""
        trial = self._campaign.run_once(self._training, self._campaign.new_folder(name))
        if trial.code != 0 or trial.completed <= trial.iterations:
            return trial
        self._campaign.forget(trial.folder)
        self._training = replace(self._training, checkpoint_at=trial.completed)
        return self._campaign.run_once(self._training, self._campaign.new_folder(name))

    def disturbed(self, seed: int) -> Trial:
        """A run with the faults of a seed, or of the given plan."""
        if self.trial.outcome == Outcome.ENDED:
            return replace(self.trial, seed=seed)
        given, runs = self._campaign.given, list[Trial]()
        for attempt in range(_ATTEMPTS if self._campaign.learns and given is None else 1):
            plan = random_plan(self._shape(), seed, attempt) if given is None else given
            runs.append(self.compared(plan, f"seed-{seed}", seed))
            # One that ended by itself is to be seen.
            if runs[-1].outcome != Outcome.NOT_STRUCK or runs[-1].reason:
                break
        return replace(
            runs[-1],
            seed=None if given is not None else seed,
            attempts=len(runs),
            spent_s=sum(run.wall_s for run in runs),
            cpu_s=_sum(run.cpu_s for run in runs),
        )

    def compared(self, plan: tuple[Fault, ...], name: str, seed: int | None = None) -> Trial:
        """A run with these faults. If it differs, another undisturbed run says whether that tells anything.

        Args:
            plan: the faults.
            name: the name that its folder gets.
            seed: that has drawn them.

        Raises:
            SwiftError: if undisturbed runs differ, too, in more than files and variables.
        """
        training = self._training
        folder = self._campaign.new_folder(name)
        trial = self._campaign.run_once(training, folder, plan, self.trial, seed)
        if trial.outcome == Outcome.WRONG and trial.state:
            self.look_again()
            if self._training is not training:  # another thread may have looked
                # The same run: what went wrong in it may go well in another one.
                trial = judged_again(trial, self._training, self.trial)
        if trial.outcome.is_good or (trial.outcome == Outcome.NOT_STRUCK and not trial.reason):
            self._campaign.forget(trial.folder)
        return trial

    @property
    def unstable(self) -> Unstable:
        """Files and variables in which undisturbed runs differ, as far as that was looked at."""
        return self._training.unstable

    def differing(self, trial: Trial) -> list[str]:
        """The names of all that differs in a run: of its files alone where its state cannot be compared."""
        names = self.unstable.differing(trial.state, self.trial.state)
        return names if "iteration" in trial.state else [name for name in names if name.startswith(FILE)]

    def look_again(self) -> None:
        """Find what undisturbed runs do not have in common: once. It is not compared from then on.

        Raises:
            SwiftError: they differ in more than files, and variables of the script.
        """
        with self._lock:
            if self._again or not self._campaign.learns:
                return
            self._again = True
            one, other = self.trial.state, self._undisturbed("undisturbed-again").state
            found = Unstable.between(one, other)
            if values := found.of_the_state:
                raise SwiftError(
                    f"The script is not deterministic: {len(values)} values of two undisturbed runs differ "
                    f"({', '.join(values[:2])}). Seed all that it draws (swift_ft.deterministic)."
                )
            if found.names:
                self._training = replace(self._training, unstable=found)

    def _shape(self) -> Shape:
        shape, learnt = self._campaign.shape, self.trial
        if not self._campaign.learns:
            return shape
        return replace(
            shape,
            iterations=learnt.iterations,
            points=learnt.points,
            checkpoints=tuple(sorted({*learnt.checkpoints})),
            copies="copy" in learnt.points,
        )


def _sum(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if one of them is not known."""
    known = [*seconds]
    return None if None in known else math.fsum(one for one in known if one is not None)


def _shared_by_runs(script: tuple[str, ...]) -> set[Path]:
    """The folders that are the same for each run, and in which a script may write nonetheless."""
    beside = {Path.cwd()} if is_module(script) else {Path(path).parent for path in script[:1]}
    return beside | {Path.cwd()} if is_at_home(script) else beside


def _delete_store(url: str, folder: Path) -> None:
    """Empty the store of a run, unless it is in the run's folder.

    Args:
        url: the store's.
        folder: the run's. A store that does not have it in its path is not this run's alone, and stays.
    """
    try:
        store = Store(url, patience_s=_PATIENCE_S)
        local = store.local_path("")
        if str(folder).strip("/") in store.root and not (local and local.is_relative_to(folder)):
            store.delete_all()
    except Exception as error:  # as its library has them: a run that went well is none the worse for it
        _logger.warning(
            "the store of a run that is over cannot be deleted: %s",
            first_line(error),
            extra={"event": "store_not_deleted"},
        )
