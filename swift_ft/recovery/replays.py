"""How a replay begins: alone, jointly, or shared; and how a survivor helps in one of others (paper §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from swift_ft.errors import CannotHelpError, RecoveryError
from swift_ft.recovery import events as ev
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.exchange import Standing
from swift_ft.recovery.failures import is_broken_communication
from swift_ft.recovery.job_state import State
from swift_ft.recovery.pipelined import LoggedPipeline
from swift_ft.recovery.plan import Task
from swift_ft.recovery.replicated import Replicas
from swift_ft.recovery.sharing import SharedReplay

__all__ = ["Replays"]


class Replays:
    """A worker's part in replays.

    Args:
        pipeline: its stages.
        standing: where its state stands.
        replicas: of its model, if it has some.
        coordinator: makes the groups.
        own: all large state of this worker.
        on_help: told before each iteration in which it helps (faults of tests).

    Attributes:
        until: iterations that its state will have completed after its own replay.
    """

    def __init__(
        self,
        pipeline: LoggedPipeline,
        standing: Standing,
        replicas: Replicas,
        coordinator: Coordinator,
        *,
        own: Callable[[], Iterable[torch.Tensor]],
        on_help: Callable[[int], None],
    ) -> None:
        self._pipeline = pipeline
        self._standing = standing
        self._replicas = replicas
        self._coordinator = coordinator
        self._own = own
        self._on_help = on_help
        self.until = 0

    def begin(self, state: State, task: Task, shared: SharedReplay | None) -> bool:
        """Serve the next steps from the neighbours' logs; False if it is called off before it begins."""
        coordinator = self._coordinator
        self._pipeline.begin_replay(state, task)
        self.until = task.replay_until
        self._standing.known = True
        if shared is not None:
            return self._among(state, shared, lambda: self._pipeline.share(state, shared))
        if not task.portion and coordinator.group.give_up_soon():  # a replay alone talks to nobody
            return True
        if not coordinator.enter_portion(state.generation, task.portion or (coordinator.context.rank,)):
            return False
        self._replicas.reset(task.begin)
        return True

    def help(self, state: State, shared: SharedReplay, iteration: int) -> bool:
        """Compute for those that replay, at this worker's iteration. Its own state is as before in any case.

        Returns:
            Whether they are done; else it was broken off.
        """
        self._coordinator.tell_progress(iteration, "helping")
        own = self._own()
        done = self._among(state, shared, lambda: self._pipeline.help(state, shared, own, self._on_help))
        if done:
            self._coordinator.keep_group()
        return done

    def _among(self, state: State, shared: SharedReplay, take_part: Callable[[], object]) -> bool:
        """Take part in a shared replay, in its group; False if that was broken off, and everybody knows."""
        coordinator = self._coordinator
        if not coordinator.enter_portion(state.generation, shared.members, closely=True):
            return False
        try:
            take_part()
        except Exception as error:  # of the script's `build`, too
            lost_touch = is_broken_communication(error)
            if isinstance(error, RecoveryError) and not isinstance(error, CannotHelpError):
                coordinator.leave_group()
                raise
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return True
        # Only now, when the traceback is gone: it holds on to the group.
        if lost_touch:
            coordinator.lose_touch(cause)
        else:
            coordinator.leave_group()
            coordinator.tell(ev.CannotHelp(coordinator.context.rank, state.generation, cause))
        return False
