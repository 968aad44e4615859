"""The watch over an agent's neighbours in the ring of all agents, and its reports of their loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from swift_ft.config import detection_timings as timings
from swift_ft.errors import FencedError, RendezvousLostError, SwiftError
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.launch.detection.policy import LostMachine
from swift_ft.launch.detection.sentinel import RECORDED, Sentinel
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.network import JobSecret, Port
from swift_ft.observe.spans import recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import neighbours_of


class Watch(NamedTuple):
    """The neighbours that a sentinel is to watch (:meth:`Sentinel.watch`)."""

    machines: Mapping[str, str]
    patience: int


class Ring:
    """Looks for neighbours when the addresses have changed.

    While a large job forms they change all the time, a look costs the size of the job, and each new neighbour
    is connected to. So looks are the rarer then the more machines there are. A machine that is lost meanwhile
    is found later, which costs no one time: the job waits for others.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: tuple[Mapping[str, str], int] | None = None
        self._look_at = 0.0

    def news(self, state: State, machine: str) -> Watch | None:
        """The neighbours that a machine watches from now on; None if unchanged, or while it is too early."""
        addresses, patience = state.membership.addresses, state.machine_patience
        if self._seen is not None and addresses is self._seen[0] and patience == self._seen[1]:
            return None
        forms = state.phase == Phase.FORMING and not state.generation
        if forms and self._now() < self._look_at:
            return None
        self._seen = addresses, patience
        self._look_at = self._now() + timings.RING_PAUSE_S * len(addresses)
        return Watch({name: addresses[name] for name in neighbours_of(machine, addresses)}, patience)


class NeighbourWatch:
    """Watches one machine's neighbours, and reports those that are lost.

    Args:
        membership: of this machine, with the journal that gets the reports.
        port: where others watch this machine.
        secret: the job's.
        kernel_log: what the kernel says, of links for instance.
        silence_s: how long a machine may be silent, before the state's patience multiplies it.
    """

    def __init__(
        self,
        membership: JournalRendezvous,
        port: Port,
        secret: JobSecret,
        kernel_log: KernelLog,
        *,
        silence_s: float,
    ) -> None:
        self._membership = membership
        self._kernel_log = kernel_log
        self._ring = Ring()
        self._unreported: SwiftError | None = None  # a loss could not be; set by a thread of the sentinel
        self._sentinel = Sentinel(silence_s=silence_s, on_lost=self._report, port=port, secret=secret)

    def look(self, state: State) -> None:
        """Watch the neighbours that this machine has now. Called in the agent's main thread.

        Raises:
            RendezvousLostError: a loss could not be reported.
            FencedError: this machine is out, and so could not report a loss.
        """
        if self._unreported is not None:
            raise self._unreported
        if (watch := self._ring.news(state, self._membership.machine)) is not None:
            self._sentinel.watch(watch.machines, patience=watch.patience)

    def tell_records(self, recorded: tuple[int, ...]) -> None:
        """Tell the machines that watch this one what they know of its records if it is lost.

        Args:
            recorded: by local rank, the iterations before which its workers have given them.
        """
        self._sentinel.tell({RECORDED: recorded})

    def close(self) -> None:
        """Watch no machine any more, and be watched by none."""
        self._sentinel.close()

    def _own_faults(self, lost: LostMachine) -> tuple[str, ...]:
        """Signs that this machine's own link is at fault: another one that it does not hear may live."""
        links = (f"at the reporter, {text}" for text in self._kernel_log.evidence(causes=[Cause.NETWORK]))
        return (*links, *(["the reporter heard no other machine, either"] if lost.deaf else ()))

    def _report(self, lost: LostMachine) -> None:
        """Called in a thread of the sentinel."""
        try:
            state, reporter = self._membership.follower.state, self._membership.machine
            if lost.machine not in state.membership.fenced and state.phase != Phase.ENDED:
                recorder.begin(recorder.now() - lost.known_ns)
                faults = self._own_faults(lost)
                # The end of a connection came over that link. Where nothing did, who is cut off is not known.
                blamed = Cause.NETWORK if faults and (lost.silent or lost.deaf) else ""
                with recorder.span("detect", machine=lost.machine, known_ns=lost.known_ns):
                    self._membership.journal.append(
                        ev.MachineLost(
                            machine=lost.machine,
                            reason=lost.reason,
                            reporter=reporter,
                            silent=lost.silent,
                            cause=blamed,
                            evidence=faults,
                            recorded=lost.recorded,
                        )
                    )
        except (RendezvousLostError, FencedError) as error:
            self._unreported = error
