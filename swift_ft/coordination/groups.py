"""The process groups of generations: formed by their workers together, and left after a loss.

Once all workers are ready, each of them forms the group of a generation at once. A group of a replay waits
for workers that may still load for minutes, so its members say in the journal that they are about to form it
(:class:`swift_ft.recovery.events.GroupAwaited`). A loss ends either wait at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch.distributed as dist
from torch.distributed import DistError

from swift_ft.coordination.participant import Participant
from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.observe.spans import recorder
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.units import named

_LOOK_S = 60.0
"""A wait without a limit is made of these: an event ends it sooner."""


class Groups:
    """Forms and leaves the group of each generation.

    Args:
        participant: this worker's part in the job.
        group: torch's default group.
    """

    def __init__(self, participant: Participant, group: GenerationGroup) -> None:
        self._participant = participant
        self._group = group
        self._rank = participant.context.rank
        self._timeout_s = participant.context.config.group_timeout_s

    def on_change(self, state: State) -> None:
        """Break what the group waits for once its generation is over. Called in the journal thread."""
        if self._participant.generation_over(state):
            self._group.abort()

    def abort(self) -> None:
        """Break what the group waits for. From any thread."""
        self._group.abort()

    def enter(self, generation: int) -> bool:
        """Form the group of a generation. False if that failed and another generation is due.

        All workers are ready, and so about to form it, too.
        """
        self._participant.active.enter(generation, WorkerOrder.RUN)
        if self._participant.is_cancelled():
            self._participant.active.leave()
            return False
        return self._join(lambda: self._group.join(generation))

    def enter_replay_group(
        self, generation: int, replay_group: tuple[int, ...], *, with_helpers: bool = False
    ) -> bool:
        """As :meth:`enter`, for some workers that replay together, once all of them are about to.

        Args:
            generation: that they replay in.
            replay_group: their ranks.
            with_helpers: also form a group of only these workers, for their collectives.
        """
        with recorder.span("wait for members", replay_group=replay_group):
            all_come = self._all_come(replay_group, generation)
        if not all_come:
            return False
        join = partial(
            self._group.join_replay_group, str(generation), replay_group, with_helpers=with_helpers
        )
        return self._join(join)

    def subgroup(self, ranks: tuple[int, ...]) -> AbstractContextManager[dist.ProcessGroup]:
        """A group of some workers, within the block. All workers call it, members or not.

        Raises:
            RuntimeError: as torch does, if a worker does not come in time.
        """
        return self._group.subgroup(ranks)

    def shorten_timeout(self) -> bool:
        """Let an operation on the group that the script made fail soon, since no other worker joins in it.

        Returns:
            False if there is no group.
        """
        return self._group.shorten_timeout()

    def on_connection_broken(self, cause: str) -> None:
        """Leave the group at once, since neighbours wait for the end of our connections.

        Then wait until the journal says which machine died.
        """
        self._group.leave()
        self._participant.confirm_loss(cause)
        self.leave()

    def leave_generation(self) -> None:
        """Leave the group of a generation. A newcomer keeps the group that its script made.

        That group was never connected, but torch's stages ask it for ranks, in a replay too.
        """
        if self._participant.active.number is not None:
            self.leave()

    def keep(self) -> None:
        """Leave the group later: this worker is done in it, but others may still read what it sent."""
        self._participant.active.leave()

    def leave(self) -> None:
        """Leave the group, if there is one."""
        self._participant.active.leave()
        self._group.leave()

    def destroy_left(self) -> None:
        """Training goes on: destroy the groups that were left, if there are any."""
        self._group.destroy_left()

    def _all_come(self, ranks: Sequence[int], generation: int) -> bool:
        """Wait until some workers are about to form a group. False if another generation is due first."""
        participant = self._participant
        participant.active.enter(generation, WorkerOrder.EXECUTE)
        participant.append(ev.GroupAwaited(rank=self._rank, generation=generation))

        def done(state: State) -> bool:
            return participant.generation_over(state) or _all_here(state, ranks)

        with waiting(partial(_missing_in_words, participant, ranks)):
            while participant.wait_for(done, _LOOK_S) is None:
                pass
        if participant.is_cancelled():
            participant.active.leave()
            return False
        return True

    def _join(self, join: Callable[[], None]) -> bool:
        cause = ""
        try:
            with (
                recorder.span("connect"),
                waiting("all workers of a group to connect", self._timeout_s, flag="--group-timeout"),
            ):
                join()
        except (DistError, RuntimeError) as error:
            cause = f"the group could not be formed: {first_line(error)}"
            if missing := self._group.missing():
                cause += f"; {named('worker', missing)} did not come"
        else:
            if not self._participant.is_cancelled():
                return True
        # Without a cause the journal has recorded a loss in the meantime.
        self._group.leave()
        if cause:
            self._participant.confirm_loss(cause)
        self._participant.active.leave()
        return False


def _all_here(state: State, ranks: Sequence[int]) -> bool:
    """Whether all workers of a group are about to form it. Asked after each event, so it must be cheap."""
    awaiting = state.round.awaiting
    if len(awaiting) < len(ranks):
        return False
    return len(ranks) == state.world_size or all(rank in awaiting for rank in ranks)


def _missing(state: State, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank not in state.round.awaiting]


def _missing_in_words(participant: Participant, ranks: Sequence[int]) -> str:
    missing: list[int] = []
    with contextlib.suppress(RendezvousLostError):  # another thread says so
        missing = _missing(participant.state, ranks)
    return f"{named('worker', missing) if missing else 'all workers'} to form a group"
