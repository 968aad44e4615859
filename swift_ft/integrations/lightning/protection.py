"""The session around a Trainer's loop: what it protects, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift_ft.config.worker_context import WorkerContext
from swift_ft.integrations.lightning.log_files import LogFiles
from swift_ft.integrations.lightning.progress import TrainerProgress
from swift_ft.integrations.lightning.saved_files import SavedFiles
from swift_ft.session import Session


class Protection:
    """The additions of a strategy to fit().

    Args:
        attach: attaches the model to the session.
        remove: removes a checkpoint of the Trainer's, on worker 0.
        options: arguments of the session.
    """

    def __init__(
        self, attach: Callable[[Session], None], remove: Callable[[str], None], options: Mapping[str, Any]
    ) -> None:
        self._attach = attach
        self._remove = remove
        self.options = options
        self._session: Session | None = None
        self.seed = int(options.get("seed", 0))
        self.saved: SavedFiles | None = None  # while the loop runs

    def hold_back(self, trainer: Any) -> None:
        """Before the script's loggers begin to write: a replacement goes on with what is there."""
        context = WorkerContext.from_env()
        self._logs = LogFiles(trainer.loggers, writes=context.rank == 0)
        if context.rank == 0 and (context.started_in > 1 or context.config.resume):
            self._logs.be_silent()

    def start(self, trainer: Any) -> tuple[Session, TrainerProgress]:
        """Make the session, as the loop is about to begin: optimizers and callbacks have their state."""
        strategy, logs = trainer.strategy, self._logs
        self.saved = saved = SavedFiles(trainer, self._remove)
        # A replacement learns it from a replica.
        logs.versions, saved.there = strategy.broadcast((logs.own_versions(), saved.found()))
        logs.begin()
        saved.begin()
        progress = TrainerProgress(trainer, logs, saved)
        state: dict[str, Any] = {"model": strategy.model}
        for number, optimizer in enumerate(strategy.optimizers):
            state[f"optimizer{number}"] = optimizer
        for number, config in enumerate(strategy.lr_scheduler_configs):
            state[f"scheduler{number}"] = config.scheduler
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            state["scaler"] = scaler
        state["trainer"] = progress
        self._session = Session(state, **self.options)
        self._attach(self._session)
        self._session._assembly.attached.keep_stop()
        return self._session, progress

    # By the session's iteration, not by `step.index`: a script that reads that may take its batches by it.

    def stop_after_this_step(self) -> None:
        """The Trainer is done once this step is."""
        assert self._session is not None
        self._session._assembly.between.stop.at = self._session.iteration + 1

    def has_stopped_before(self) -> bool:
        """Whether an earlier run was done by this step, which goes on from there."""
        assert self._session is not None
        return self._session._assembly.between.stop.has_ended_before(self._session.iteration)

    def end(self) -> None:
        """The loop is over: what follows is the script's own."""
        assert self.saved is not None
        self.saved.step_begins()
        self.saved = None
