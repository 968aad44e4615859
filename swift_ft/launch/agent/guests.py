"""Slots that no machine fills: a smaller world follows, a guest on this machine takes one, or the job ends.

See `recovery/survivors.py` and `recovery/guests.py`.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from swift_ft.config import detection_timings as timings
from swift_ft.config import store_keys
from swift_ft.coordination.store_client import keys_of_world
from swift_ft.costs.equal_devices import measured_layers
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.launch.agent.room import why_no_room
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.guests import guests_wanted, possible_hosts
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_pipelines import sizes_of, takes_unlike
from swift_ft.recovery.pauses import Returns, guest_put_off_s
from swift_ft.recovery.survivors import Answer, answer_of

_logger = logging.getLogger(__name__)

_TRIES = 3
"""The number of times that a guest which ends before it has joined is started again."""
_GLANCE_S = 0.1
"""At each look the agent gives the rendezvous store this time to answer; mostly that takes less."""


class Guests:
    """Answers a loss, or a machine that was asked to leave, when it has waited long enough for a machine.

    The machine in the lowest slot plans a smaller world, if one is asked for. Else machines take guests.

    Args:
        standby: forks them.
        wait_s: how long the job waits for a machine of its own.
    """

    def __init__(self, standby: Standby, membership: JournalRendezvous, wait_s: float) -> None:
        self._standby = standby
        self._membership = membership
        self._wait_s = wait_s
        self._since: float | None = None
        self._put_off_s = 0.0
        self._tries: Counter[int] = Counter()  # by slot, since all slots were filled
        self._said = 0  # the generation in which it was said why guests come

    @property
    def due_at(self) -> float | None:
        """When the job will have waited for so long, on the monotonic clock; None if it does not wait."""
        if self._since is None:
            return None
        now, waits = time.monotonic(), (self._since + self._wait_s, self._since + self._put_off_s)
        return min((at for at in waits if at > now), default=None)

    def check(self, state: State, workers: Iterable[int]) -> None:
        """Start the guests that this machine is to take, if the job has waited for so long.

        Args:
            workers: pids of this machine's workers.
        """
        if state.phase == Phase.FORMING and state.worlds.change is not None:
            return  # if that comes to nothing, the job has waited for long enough
        answer, wanted = answer_of(state), guests_wanted(state)
        if not wanted and not answer.machines:
            self._since = None
            self._tries.clear()
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        machine = self._membership.machine
        own = wanted.get(machine, ())
        self._put_off_s = guest_put_off_s(state, machine) if own else 0.0
        if now - self._since < self._wait_s:
            return
        if self._answers(state, answer) or now - self._since < self._put_off_s:
            return
        for slot in own:
            if slot in self._standby.guests:
                continue
            if reason := self._why_not(slot, workers):
                self._membership.journal.append(ev.GuestDeclined(machine=machine, reason=reason))
                return
            self._tries[slot] += 1
            self._standby.launch_guest(slot, machine)

    def _answers(self, state: State, answer: Answer) -> bool:
        """Plan a smaller world, or say why guests come. True if nothing else is to be done here."""
        first = next(iter(possible_hosts(state)), None) == self._membership.machine
        if answer.machines and first:
            self._membership.follower.append(self._planned(state, answer))
        elif answer.why_guests and first and self._said != state.generation:
            self._said = state.generation
            _logger.warning(
                "no smaller world can follow the loss, so that other machines run the lost workers, too: %s",
                answer.why_guests,
                extra={"event": "guests_instead", "reason": answer.why_guests},
            )
        return bool(answer.machines)

    def _planned(self, state: State, answer: Answer) -> ev.ChangePlanned:
        """The smaller world, with the layers and the microbatches of pipelines that are to be unlike."""
        reason, plan = "no machine came for a lost one, and the survivors hold all of the state", ""
        if answer.pipelines:
            layers, unlike = self._measured(state), takes_unlike(state)
            plan = plan_after_loss(answer.pipelines, sizes_of(state), layers, unlike=unlike).to_text()
            reason += f": as pipelines of {' and '.join(map(str, answer.pipelines))} stages"
        return ev.ChangePlanned(
            world=state.worlds.planned + 1,
            machines=answer.machines,
            plan=plan,
            reason=reason,
            asked_by="--on-loss shrink",
        )

    def _measured(self, state: State) -> list[LayerProfile] | None:
        """The costs of layers, if all workers of the present world have measured theirs."""
        store = keys_of_world(self._membership.store, state.worlds.present.number)
        keys = [store_keys.layers(rank) for rank in range(state.world_size)]
        if not store.check(keys):
            return None
        with waiting("the rendezvous store to say what layers cost"):
            return measured_layers(store.multi_get(keys), state.layouts.placed)

    def wait_for_end(self, limit_s: float) -> None:
        """The job has ended: let the guests end by themselves. The standby kills the rest.

        A guest that was killed while it archives the journal would leave a begun file in the store.
        """
        deadline = time.monotonic() + limit_s
        with waiting("its guests to end", limit_s):
            while self._standby.guests and (left := deadline - time.monotonic()) > 0:
                ready, _, _ = select.select([self._standby], [], [], left)
                if ready and self._standby.receive() is None:
                    return

    def _why_not(self, slot: int, workers: Iterable[int]) -> str:
        """Why this machine cannot take a guest; empty if it can."""
        if self._tries[slot] == _TRIES:
            return f"its guest ended {_TRIES} times before it had joined"
        if reason := self._standby.unforked.pop(slot, ""):
            return f"it can start no more processes ({reason})"
        return why_no_room(workers, "a guest needs")


class FormingDeadline:
    """Ends a job whose slots stay empty for too long.

    Args:
        limit_s: how long that may be (``--join-timeout``). It counts from the end of all pauses for which
            machines were told to stay away, and again from the end of a silence of the rendezvous store.
        elastic_wait_s: how long the job waits before other machines take guests.
    """

    def __init__(self, membership: JournalRendezvous, limit_s: float, elastic_wait_s: float) -> None:
        self._membership = membership
        self._limit_s = limit_s
        self._elastic_wait_s = elastic_wait_s
        self._since: float | None = None
        self._returns = Returns()
        self._question: _Question | None = None

    def check(self, state: State) -> None:
        """Call it again and again, in all phases."""
        now = time.monotonic()
        back_at = self._returns.last_at(state, now)
        if state.phase != Phase.FORMING or state.worlds.change is not None:  # which has a deadline of its own
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - max(self._since, back_at) <= self._limit_s:
            return
        if (took_s := self._answer_took_s()) is None:
            return
        if took_s >= timings.STORE_CONNECTION_SILENCE_S:  # nobody could join while it was silent
            self._since = time.monotonic()
            return
        away = self._returns.machines(after=self._since)
        reason = self._nobody_joined(state, away)
        self._membership.journal.append(ev.JobClosed(reason=reason, cause=Cause.MACHINE))

    def _answer_took_s(self) -> float | None:
        """The time that the rendezvous store takes to answer, in seconds. None if it has not yet.

        Raises:
            RendezvousLostError: it is given up.
        """
        if self._question is None:
            self._question = _Question(partial(self._membership.store.check, [store_keys.claimed()]))
        if (took_s := self._question.took_s()) is not None:
            self._question = None
        return took_s

    def _nobody_joined(self, state: State, away: list[str]) -> str:
        empty = [slot for slot, member in enumerate(state.members) if member is None]
        reason = f"no machine joined for slots {empty} within {self._limit_s:g} s"
        if away:
            reason += f" after the end of a pause, for which {', '.join(away)} had to stay away"
        if (least := state.shape.min_machines) is not None and len(possible_hosts(state)) < least:
            reason += f", and fewer than {least} machines are left"
        elif self._elastic_wait_s >= self._limit_s and guests_wanted(state):
            reason += f", and no other machine runs them before --elastic-wait ({self._elastic_wait_s:g} s)"
        reason += ": start one more `swift-run` with the same --rdzv-endpoint, or keep spares"
        if refused := state.membership.refused:
            reason += f" (refused: {len(refused)}, such as {min(refused)}: {refused[min(refused)]})"
        return reason


class _Question:
    """Asks in a thread of its own: a store that is frozen would hold the agent as well."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._began = time.monotonic()
        self._took_s: float | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="swift-forming", daemon=True)
        self._thread.start()

    def took_s(self) -> float | None:
        """See :meth:`FormingDeadline._answer_took_s`."""
        self._thread.join(_GLANCE_S)
        if self._error is not None:
            raise self._error
        return self._took_s

    def _run(self) -> None:
        try:
            with waiting("the rendezvous store to say whether a machine has come"):
                self._ask()
        except Exception as error:  # whoever waits raises it
            self._error = error
        else:
            self._took_s = time.monotonic() - self._began
