"""Workers of the next world on this machine, beside those that train (`recovery/worlds.py`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from swift_ft.errors import UsageError
from swift_ft.host.signal_names import signal_in, signal_name
from swift_ft.launch.agent.room import why_no_room
from swift_ft.launch.detection.kernel import OomKills
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.launch.processes.context import StandbyContext, output_prefixes, worker_jobs
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.launch.settings import AgentSettings
from swift_ft.program.secrets import without_secrets
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.worlds import Change, NextTodo, next_todo
from swift_ft.torch_adapters.elastic_agent import MachineLogs

_NUMBERS = 1 << 20
"""The standby knows the workers of worlds with odd and even numbers by numbers that are so far apart."""
_PLACE_S = 0.02


class WorkersOf(Protocol):
    """The agent, as far as it makes descriptions of workers."""

    def workers_in(self, slot: int, machines: int, master: tuple[str, int]) -> WorkerGroup:
        """Workers for a slot of the next world."""

    def torch_env(self, worker: Worker, local_rank: int, group: WorkerGroup | None = None) -> dict[str, str]:
        """Torchrun's variables for a worker."""


class NextWorld:
    """Starts the next world's workers here, and ends them if their world does not take over.

    Owner: the agent's main thread.

    Args:
        agent: makes descriptions of workers.
        settings: what the agent runs.
        standby: forks the workers.
        membership: this machine's, with the journal.
        logs: where their output goes.
        heard: listens to them; what they say of their logs and their store, the agent has to know, too.
        on_other: called with a report of the standby that is of none of them.
        oom_kills: what the kernel has killed on this machine.

    Attributes:
        number: of the world whose workers run here; None if there are none.
        started_in: the generation for which they were started.
        group: their description.
        processes: they themselves.
        heard: what they say.
    """

    def __init__(
        self,
        agent: WorkersOf,
        settings: AgentSettings,
        standby: Standby,
        membership: JournalRendezvous,
        logs: MachineLogs,
        heard: WorkerChannels,
        on_other: Callable[[dict[str, int]], object],
        oom_kills: OomKills,
    ) -> None:
        self._agent = agent
        self._settings = settings
        self._standby = standby
        self._membership = membership
        self._logs = logs
        self._on_other = on_other
        self._oom_kills = oom_kills
        self._since = 0.0
        self._waits_for_place = False
        self.number: int | None = None
        self.started_in = 0
        self.group: WorkerGroup | None = None
        self.processes: StandbyContext | None = None
        self.heard = heard

    @property
    def pause_s(self) -> float:
        """The longest time between two calls of :meth:`look`."""
        return _PLACE_S if self._waits_for_place else 60.0

    def look(self, state: State, present: Iterable[int]) -> bool:
        """Do what the state asks for. True if the next world has taken over, and the agent has to adopt it.

        Args:
            state: the job's.
            present: pids of the workers that train here.
        """
        self._waits_for_place = False
        match next_todo(state.worlds, self._membership.machine, self.number):
            case NextTodo.ADOPT:
                return True
            case NextTodo.DROP:
                self.drop()
            case NextTodo.START:
                assert state.worlds.change is not None
                self._start(state, state.worlds.change, present)
            case NextTodo.NOTHING if self.number is not None:
                self._give_up_if_late(state)
        return False

    def _start(self, state: State, change: Change, present: Iterable[int]) -> None:
        """Start the workers, once it is known where they meet."""
        slot, world = change.slot_of(self._membership.machine), change.world
        assert slot is not None
        if (place := self._membership.bootstrap.place_of_next(self._membership.machine, change)) is None:
            self._waits_for_place = True
            return
        if reason := why_no_room(present, "the next world's workers need"):
            self._give_up(world.number, f"machine {self._membership.machine}: {reason}")
            return
        per_machine = state.shape.workers_per_machine
        group = self._agent.workers_in(slot, len(world.machines), place)
        try:
            jobs = worker_jobs(
                self._settings,
                group.workers,
                lambda worker, number: self._agent.torch_env(worker, number, group),
                run_id=self._membership.get_run_id(),
                machine=self._membership.machine,
                workers_per_machine=per_machine,
                generation=change.started_in,
                joins=False,
                tries=state.tries,
                world=world,
                recorded=self.heard.recorded_with(state.membership.recorded),
            )
        except UsageError as error:
            self._give_up(world.number, str(error))
            return
        self._logs.generation = change.started_in
        self.group = group
        self.processes = StandbyContext(
            self._standby,
            jobs,
            self._logs,
            output_prefixes(group.workers, slot, per_machine),
            first=world.number % 2 * _NUMBERS,
            on_other=self._on_other,
        )
        self.processes.start()
        self.number, self.started_in = world.number, change.started_in
        self._since = time.monotonic()
        self.heard.open(self.processes.channels)
        self._membership.serve(self.processes.lines.values())

    def note(self, report: dict[str, int]) -> bool:
        """Note a report of the standby. False if it is of none of these workers."""
        if self.processes is None or not self.processes.owns(report):
            return False
        if "stopped" in report:  # all would wait for it, and it sends no heartbeats that anybody misses
            self._give_up_stopped(report["stopped"])
            return True
        local_rank = self.processes.note(report)
        if local_rank is not None and self.number is not None:
            self.heard.read(local_rank)
            self._give_up(self.number, self._why_ended(local_rank))
        return True

    def _give_up_stopped(self, pid: int) -> None:
        if self.number is not None:
            why = f"a worker of the next world on machine {self._membership.machine} (process {pid})"
            self._give_up(self.number, f"{why} was stopped by a signal")

    def _why_ended(self, local_rank: int) -> str:
        assert self.processes is not None
        assert self.group is not None
        code, rank = self.processes.exit_codes[local_rank], self.group.workers[local_rank].global_rank
        said = self.heard.failed.get(local_rank, {}).get("failed")
        why = f"was killed by {signal_name(-code)}" if code < 0 else said or f"ended with exit code {code}"
        number = signal_in(code) if code < 0 or not said else 0
        if number and (kernel := self._oom_kills.why(killed=number == signal.SIGKILL)):
            why = f"{why}: {kernel}"
        return (
            f"worker {rank} of the next world on machine {self._membership.machine}: {without_secrets(why)}"
        )

    def _give_up_if_late(self, state: State) -> None:
        """End a change whose workers here do not come to their session."""
        limit_s, change = self._settings.config.join_timeout_s, state.worlds.change
        if change is None or time.monotonic() - self._since < limit_s:
            return
        self._give_up(change.world.number, f"the next world has not taken over within {limit_s:g} s")

    def _give_up(self, world: int, reason: str) -> None:
        change = self._membership.follower.state.worlds.change
        if change is not None and change.world.number == world:
            self._membership.follower.append(ev.ChangeGivenUp(world=world, reason=reason))

    def drop(self) -> None:
        """End them: their world does not take over."""
        if self.processes is None:
            return
        self.heard.close()
        self.processes.close(signal.SIGKILL)
        self.number = self.group = self.processes = None

    def leave_to_agent(self) -> tuple[WorkerGroup, StandbyContext]:
        """They are the agent's from now on, which has to take over what :attr:`heard` knows, too."""
        assert self.group is not None
        assert self.processes is not None
        self.processes.on_other = self.note  # as of all workers that train here
        found = self.group, self.processes
        self.number = self.group = self.processes = None
        return found
