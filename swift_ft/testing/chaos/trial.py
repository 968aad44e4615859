"""The training of all runs, one run of it, and its outcome in comparison with the undisturbed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from swift_ft.testing.chaos.forked_launchers import ForkServer
from swift_ft.testing.chaos.habits import Habit
from swift_ft.testing.chaos.run_folder import FOLDER, output_of, store_in
from swift_ft.testing.chaos.unstable import Unstable

_PLANTED = str(Path(__file__).with_name("planted.py"))


class Outcome(StrEnum):
    """The outcome of a disturbed run, in comparison with the undisturbed one."""

    IDENTICAL = "identical"
    """Its last checkpoint and its script's files are those of the undisturbed run, bit for bit."""
    BOUNDED = "within bound"
    """They differ as far as a documented way of recovery may let them: an undo without exact=True, running
    statistics of a lost replica, or a variable that each replica has for itself, of a worker that has named
    it and came after the last step."""
    NOT_STRUCK = "not struck"
    """None of its faults struck: it shows nothing, also where it ended with an error."""
    ENDED = "ended"
    """Its faults ended it, with an error in one line, and its last checkpoint loads, or the newest one that
    no fault has damaged; or before its first checkpoint, or faults have damaged each that there was. Nothing
    is silently wrong."""
    DAMAGED = "damaged"
    """It ended well, and a fault has damaged its last checkpoint. The newest one that no fault has damaged
    loads, if any is left, and is that of the undisturbed run where that has kept it, and so are the script's
    files."""
    WRONG = "WRONG"
    """It ended well, with another state or other files, or with a checkpoint that does not load for no
    fault."""
    HUNG = "HUNG"
    """It did not end in time."""
    CRASHED = "CRASHED"
    """It ended with a traceback of swift_ft's own, by a signal, or without saying why; or with an error that
    none of its faults can have caused: replicas differ, the script or swift_ft itself failed, or the script
    is refused, which undisturbed it was not; or with any error, where its faults have left machines,
    connections and files as they were. Without the events of the run nobody can know."""
    LEAKED = "LEAKED"
    """It left processes behind, shared memory that the undisturbed run does not leave, or temporary files of
    swift_ft's own."""
    UNLOADABLE = "NO CHECKPOINT"
    """Its faults ended it, with an error in one line, and the checkpoint that it had last does not load."""

    @property
    def is_good(self) -> bool:
        """Whether a campaign of such outcomes alone has found nothing."""
        return self in (Outcome.IDENTICAL, Outcome.BOUNDED, Outcome.ENDED, Outcome.DAMAGED)


@dataclass(frozen=True, slots=True)
class Training:
    """The training that all trials run.

    Attributes:
        launch: flags of swift-run.
        script: the script, or ``-m`` and a module, and its arguments; ``{folder}`` stands for a folder of
            each run's own. If none of them has it, each run's working directory is that folder.
        store: the run's store, with ``{folder}``; empty for the one that the run has in its folder.
        deadline_s: seconds after which a run counts as hung, or later if its faults may take longer.
        habits: that are planted into the script.
        checkpoint_at: the last iteration, where the script saves none after it; None where it does.
        unstable: all in which undisturbed runs differ, and which is not compared.
        server: forks the launcher; None for a new interpreter.
    """

    launch: tuple[str, ...]
    script: tuple[str, ...]
    store: str
    deadline_s: float
    habits: tuple[Habit, ...] = ()
    checkpoint_at: int | None = None
    unstable: Unstable = field(default_factory=Unstable)
    server: ForkServer | None = field(default=None, compare=False, repr=False)

    @property
    def command(self) -> tuple[str, ...]:
        """The script with its habits, and its arguments."""
        return (_PLANTED, ",".join(self.habits), *self.script) if self.habits else self.script

    def store_of(self, folder: Path) -> str:
        """The store of the run in a folder; empty if it has none."""
        return self.store.replace(FOLDER, str(folder)) if self.store else store_in(folder) or ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        plan: the faults, as ``--inject`` reads them.
        outcome: how it ended.
        code: exit code; None if it hung.
        reason: the line with which it ended, or what is wrong; empty if nothing is.
        state: digest of each value in the last checkpoint and of each file, by name.
        folder: the run's.
        habits: that were planted.
        missed: faults that never struck, and those of a store that no call has met.
        ways: the mode of each of its recoveries, in order.
        recovery_s: seconds of all recoveries.
        lost: completed iterations that were computed again.
        wall_s: seconds of the whole run.
        seed: of its plan; None if the plan was given.
        points: that its workers passed; known of the undisturbed run.
        checkpoints: the iterations of its committed checkpoints.
        completed: iterations that its workers had completed when the script ended; 0 if they had no session.
        leaves: kinds of names that it left in shared memory; an undisturbed run's are the script's own.
        attempts: runs of its seed, of which this is the last: in those before it no fault struck.
        spent_s: seconds of all of these runs.
        cpu_s: seconds that the processes of all of them have computed; None if that is not known.
    """

    plan: str
    outcome: Outcome
    code: int | None
    reason: str
    state: dict[str, str]
    folder: Path
    habits: tuple[Habit, ...] = ()
    missed: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    recovery_s: float = 0.0
    lost: int = 0
    wall_s: float = 0.0
    seed: int | None = None
    points: frozenset[str] = frozenset()
    checkpoints: tuple[int, ...] = ()
    completed: int = 0
    leaves: frozenset[str] = frozenset()
    attempts: int = 1
    spent_s: float = 0.0
    cpu_s: float | None = None

    @property
    def iterations(self) -> int:
        """Those of the last checkpoint."""
        return int(self.state.get("iteration", 0))

    @property
    def output(self) -> Path:
        """The file with all that it has printed."""
        return output_of(self.folder)
