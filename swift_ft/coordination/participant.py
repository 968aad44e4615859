"""One worker's part in the protocol: it follows the journal, appends events, and waits for orders.

The protocol decides; the runtime acts on the orders, in the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.config.exit_codes import EXIT_FENCED
from swift_ft.config.option import flag_of
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import tell_agent
from swift_ft.coordination.archive import JournalArchiver
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import EventLog
from swift_ft.coordination.progress import ProgressBoard, places_of, standing, without_places
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.errors import JobEndedError, SwiftError
from swift_ft.observe.spans import recorder
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder, worker_order
from swift_ft.recovery.waits import Limit, limit_of_answers

_logger = logging.getLogger(__name__)

_MOST_PLACES = 3
"""Of late workers, in an event: where one is says most."""
_ENDED = ("onnection closed by peer", "onnection reset by peer", "roken pipe")
"""Parts of the messages in which gloo and the kernel say that the other side ended a connection."""


class Participant:
    """Connects a worker to the job.

    Args:
        context: the worker's place.
        journal: the job's journal.
        progress: what all workers publish; a replay that advances is not given up.
        trace: learns of each change before anything else here does.
        archiver: archives the journal, if that is this worker's duty.

    Attributes:
        context: the worker's place.
        active: the generation whose group this worker is in.
    """

    def __init__(
        self,
        context: WorkerContext,
        journal: EventLog,
        progress: ProgressBoard,
        trace: RecoveryTrace,
        archiver: JournalArchiver | None = None,
    ) -> None:
        self._trace = trace
        self._archiver = archiver
        self.context = context
        self.active = ActiveGeneration()
        # The last answer of `is_cancelled`, in one reference, with what it was made of.
        self._asked: tuple[State | None, tuple[int, WorkerOrder] | None, bool] = (None, None, False)
        self._progress = progress
        # Owner: the training thread, which sets it before the journal thread starts.
        self._listeners: Sequence[Callable[[State], None]] = ()
        self._follower = Follower(
            journal,
            on_change=self._on_change,
            on_entries=self._on_entries,
            on_snapshot=archiver.on_snapshot if archiver is not None else None,
        )

    def start(self, *listeners: Callable[[State], None]) -> None:
        """Begin to follow the job.

        Args:
            listeners: called in the journal thread with each new state, in this order. They must return soon.
        """
        self._listeners = listeners
        self._trace.start()
        self._follower.start()
        tell_agent(session=True)

    def _on_entries(self, entries: Sequence[Entry]) -> None:
        """Called in the journal thread, and before it begins."""
        self._trace.on_entries(entries)
        if self._archiver is not None:
            self._archiver.on_entries(entries)

    def _on_change(self, before: State, after: State) -> None:
        """Called in the journal thread."""
        self._trace.on_change(before, after)
        if self.order(after) == WorkerOrder.DIE:
            if self.context.world != after.worlds.present.number:  # it was left behind, or did not take over
                os._exit(EXIT_FENCED)
            _logger.warning(
                "worker %d was replaced and ends here",
                self.context.rank,
                extra={"event": "worker_fenced", "rank": self.context.rank},
            )
            os._exit(EXIT_FENCED)
        for listener in self._listeners:
            listener(after)

    # ------------------------------------------------------------------------------- events and orders

    @property
    def state(self) -> State:
        """The newest state of the job."""
        return self._follower.state

    def append(self, event: ev.Event) -> State:
        """Append an event to the journal, and return the state that follows from it."""
        with recorder.span("append", event=type(event).__name__):
            return self._follower.append(event)

    def post(self, event: ev.Event) -> None:
        """Have an event written, before all that is appended later. Relays may hold it for a while."""
        self._follower.post(event)

    def order(self, state: State) -> WorkerOrder:
        """The order of this worker in a state."""
        context = self.context
        return worker_order(
            state,
            machine=context.machine,
            rank=context.rank,
            started_in=context.started_in,
            world=context.world,
        )

    def generation_over(self, state: State) -> bool:
        """Whether the generation whose group this worker is in is over."""
        return self.active.is_over(state.generation, self.order(state))

    def is_cancelled(self) -> bool:
        """As :meth:`generation_over`, now. Free while nothing changes, since each wait of a step asks."""
        state, entered = self.state, self.active.entered
        if (known := self._asked)[0] is not state or known[1] is not entered:
            over = is_other(entered, state.generation, self.order(state))
            known = self._asked = (state, entered, over)
        return known[2]

    def replay_cancelled(self, asked_in: int) -> bool:
        """Whether a replay is not asked for any more.

        Args:
            asked_in: the generation that had asked for the reports of which its plan was made.
        """
        state = self.state
        return self.order(state) != WorkerOrder.EXECUTE or state.round.asked_in != asked_in

    def is_member(self, machine: str) -> bool:
        """Whether a machine fills a slot now."""
        return machine in self.state.membership.slots

    # ------------------------------------------------------------------------------------------- waits

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        """Wait until a condition on the state holds. None if the deadline passes first."""
        return self._follower.wait_for(condition, timeout_s)

    def next_order(self) -> tuple[WorkerOrder, State]:
        """Wait until there is something to do. Machines that stay silent are reported on the way.

        Raises:
            JobEndedError: if the job has ended.
        """
        while True:
            state = self._wait(lambda s: self.order(s) != WorkerOrder.HOLD)
            order = self.order(state)
            if order == WorkerOrder.STOP:
                raise JobEndedError(f"The job has ended: {state.verdict and state.verdict.reason}")
            if order == WorkerOrder.REPORT and not self._settled(state):
                continue  # more machines of a rack were lost
            if order != WorkerOrder.HOLD:
                return order, state

    def _settled(self, state: State) -> bool:
        """Whether a generation lasts. Machines that fall silent at once are found shortly after each other.

        The plan has to come after the last of them: each one that is found later ends a recovery, and costs
        one more.
        """
        # The machines of a rack are found within a heartbeat or two. A plan that is made in between
        # asks all workers again (decision 78).
        if not state.round.after_silence:
            return True
        with waiting("further losses of machines that fell silent", timings.SETTLES_S):
            return self.wait_for(lambda s: s.generation != state.generation, timings.SETTLES_S) is None

    def wait_for_finish(self) -> State:
        """Wait until all workers have completed the last iteration, or the generation is over."""
        while True:
            done = self.wait_for(
                lambda s: s.all_finished or self.generation_over(s),
                self.context.config.report_timeout_s,
            )
            if done is not None:
                return done  # else another worker still computes; its heartbeat stops if it hangs

    def wait_for_others(self) -> State:
        """Wait until layers can move: all workers have stopped, and this generation is over.

        It is also over if one of them is lost; a worker that hangs is found by its heartbeat. The wait ends
        as well where the others have no further iteration, or where a script has left its loop.
        """
        pending = self.state.layouts.pending

        def done(state: State) -> bool:
            # Another change may have been planned in the place of the one that this worker has stopped for.
            now = state.layouts.pending
            over = self.generation_over(state) or now is None or now != pending
            return over or bool(state.membership.ended)

        limit_s, seen = self.context.config.report_timeout_s, self.state.worlds.change
        with waiting("all workers to stop, since layers move or another world takes over"):
            while True:  # a worker that hangs is lost, and that ends the wait
                if (state := self.wait_for(done, limit_s)) is not None:
                    return state
                change = self.state.worlds.change
                if change is not None and change == seen:  # no worker of the next world is watched like that
                    reason = f"nothing of its state was handed over for {limit_s:g} s"
                    self.append(ev.ChangeGivenUp(world=change.world.number, reason=reason))
                seen = change

    def confirm_loss(self, cause: str) -> None:
        """After a broken connection, wait for the event of a loss. Without one, the network was at fault.

        There is nothing to wait for where the script of another worker has ended: that was the cause.
        """
        limit_s = self._loss_known_after_s(cause) + timings.LOSS_MARGIN_S
        generation = self.active.number
        with (
            recorder.span("confirm the loss"),
            waiting("the journal to say why its connections broke", limit_s),
        ):
            known = self.wait_for(lambda s: self.generation_over(s) or bool(s.membership.ended), limit_s)
        if (known is None or not self.generation_over(known)) and generation is not None:
            self.append(ev.CommunicationFailed(rank=self.context.rank, generation=generation, reason=cause))
            self._wait(self.generation_over)

    def _loss_known_after_s(self, cause: str) -> float:
        """The longest time that the detection of the loss that broke a connection may take.

        What ended a connection is a process that is gone, which its agent sees at once, or else a machine.
        Where an operation only took too long, a worker may hang.
        """
        config, state = self.context.config, self.state
        machine_s = config.machine_silence_s * state.machine_patience
        if any(sign in cause for sign in _ENDED):
            return machine_s
        return max(machine_s, config.heartbeat_timeout_s * state.patience)

    def watch_recovery(self, generation: int) -> None:
        """Watch the other machines as one that waits does, until all are live or the generation is over.

        For a worker that replays or helps: where all do, nobody is left to see that none makes progress.
        """

        def watch() -> None:
            # Without the journal there is nothing to report to; whatever else asks it says so.
            with contextlib.suppress(SwiftError):
                self._wait(lambda s: (s.generation, s.phase) != (generation, Phase.RECOVERING))

        threading.Thread(target=watch, name="swift-recovery-watch", daemon=True).start()

    def _wait(self, condition: Callable[[State], bool]) -> State:
        """Wait for a condition. Machines that hold up all others and make no progress count as lost.

        Each phase has a deadline of its own, which begins with the phase, and again with the end of a silence
        of the rendezvous store.
        """
        watched: tuple[int, Phase, dict[int, Any]] | None = None
        while True:
            state = self.state
            recovering = state.phase == Phase.RECOVERING
            limit = limit_of_answers(state) or Limit.REPORT
            limit_s: float = getattr(self.context.config, limit)
            begun = (state.generation, state.phase)

            def over(now: State, begun: tuple[int, Phase] = begun) -> bool:
                return condition(now) or (now.generation, now.phase) != begun

            changed = self.wait_for(over, limit_s)
            if changed is not None:
                if condition(changed):
                    return changed
                watched = None
                continue
            state, asked = self.state, time.monotonic()
            progress = self._progress.read_all(state.shape.machines)
            if time.monotonic() - asked >= timings.STORE_CONNECTION_SILENCE_S:
                watched = None  # the store was silent: nobody could report, so nobody is late
                continue
            seen = (state.generation, state.phase, without_places(progress) if recovering else {})
            if seen == watched or (watched is None and not recovering):
                self._report_late(state, progress, f"within {limit_s:g} s ({flag_of(limit)})")
            watched = seen

    def _report_late(self, state: State, progress: Mapping[int, Mapping[str, Any]], within: str) -> None:
        """Report the machines that the phase waits for, if any, and where their workers stand.

        Args:
            state: the job.
            progress: of all workers, by rank.
            within: the time that they had, in words.
        """
        members, late = state.membership.members, state.missing_ranks()
        if machines := state.missing():
            # One worker that answers says nothing of another one on its machine that does not.
            silent = {*late} - {*standing(late, progress)}
            doubted = {members.get(state.slot_of_rank(rank)) for rank in silent}
            self.append(
                ev.DeadlinePassed(
                    generation=state.generation,
                    phase=state.phase,
                    machines=machines,
                    reason=f"no answer {within} while {state.phase}",
                    evidence=places_of(late, progress)[:_MOST_PLACES],
                    located=tuple(machine for machine in machines if machine not in doubted),
                )
            )


class ActiveGeneration:
    """The generation whose group this worker is in or is forming, and the order under which it does so.

    The training thread writes it; the journal thread reads it to see whether the generation is over.
    """

    def __init__(self) -> None:
        # Both facts in one reference, so that a reader never sees one without the other.
        # Owner: the training thread; read by the journal thread.
        self._entered: tuple[int, WorkerOrder] | None = None

    def enter(self, generation: int, order: WorkerOrder) -> None:
        """Note that this worker is about to form the group of a generation, under an order."""
        self._entered = (generation, order)

    def leave(self) -> None:
        """Note that this worker depends on no group any more."""
        self._entered = None

    @property
    def entered(self) -> tuple[int, WorkerOrder] | None:
        """Both facts: another object after each change."""
        return self._entered

    @property
    def number(self) -> int | None:
        """The generation; None outside of any."""
        entered = self._entered
        return entered[0] if entered is not None else None

    def is_over(self, generation: int, order: WorkerOrder) -> bool:
        """Whether the job's generation or this worker's order is now another one."""
        return is_other(self._entered, generation, order)


def is_other(entered: tuple[int, WorkerOrder] | None, generation: int, order: WorkerOrder) -> bool:
    """Whether a worker has entered a generation under an order, and not these ones."""
    return entered is not None and entered != (generation, order)
