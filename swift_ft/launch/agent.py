"""The launcher agent of one machine: torchelastic's local agent with another policy.

On a membership change, healthy workers that hold a session are left alone; they follow the journal
themselves. Only workers of a new slot, or without a session, are started anew. The loop waits for events
(journal, workers' lines, ends of processes) and never sleeps.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError

from swift_ft.config import EXIT_FENCED, Timeouts, WorkerContext
from swift_ft.launch.control import receive
from swift_ft.launch.processes import StandbyContext
from swift_ft.launch.rendezvous import JournalRendezvous
from swift_ft.launch.sentinel import Sentinel, neighbour_of
from swift_ft.launch.standby import Standby
from swift_ft.launch.worker import WorkerJob
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State, Verdict
from swift_ft.recovery.orders import AgentTodo, agent_order

__all__ = ["AgentSettings", "MachineAgent"]


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent passes on to its workers.

    Attributes:
        kind: ``script``, ``module`` or ``program`` (see :class:`WorkerJob`).
        target: the script.
        args: its arguments.
        host: the rendezvous store's host.
        port: the rendezvous store's port.
        store_mode: ``""``, ``"resume"`` or ``"fresh"``.
        inject: faults, as text.
        timeouts: all deadlines.
        shutdown_s: seconds that workers get to end before they are killed.
        address: this host, as the other agents reach it.
        helpers: see :class:`swift_ft.config.WorkerContext`.
        metrics_port: see :class:`swift_ft.config.WorkerContext`.
        profile_out: the same.
        spare: join only once all slots are filled.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    host: str
    port: int
    store_mode: str
    inject: str
    timeouts: Timeouts
    shutdown_s: int
    address: str
    helpers: int | None = None
    metrics_port: int | None = None
    profile_out: str = ""
    spare: bool = False


class MachineAgent(LocalElasticAgent):
    """Runs one machine's workers from the first rendezvous to the end of the job.

    Args:
        spec: torchelastic's description of the workers; its handler is a :class:`JournalRendezvous`.
        logs_specs: where output goes.
        settings: what the workers run.
        standby: forks the workers.
        wake: the reading end of a socket that gets a byte at each change of the journal.
        lifeline: a descriptor whose end of file means that whoever started this agent is gone.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        settings: AgentSettings,
        standby: Standby,
        wake: socket.socket,
        lifeline: int | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=settings.shutdown_s)
        assert isinstance(spec.rdzv_handler, JournalRendezvous)
        self._settings = settings
        self._standby = standby
        self._rendezvous_handler = spec.rdzv_handler
        self._sentinel = Sentinel(
            silence_s=settings.timeouts.heartbeat_s, on_lost=self._neighbour_lost, host=settings.address
        )
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(standby, selectors.EVENT_READ)
        self._lifeline = lifeline
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ)
        self._lines: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}
        self._sessions: set[int] = set()
        self._failed: dict[int, dict[str, Any]] = {}
        self._told_bare = 0
        self._forming_since: float | None = None
        self._processes: StandbyContext | None = None
        self.verdict: Verdict | None = None

    # ------------------------------------------------------------------------------------------ the loop

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            self._join()
            while True:
                result = self._obey()
                if result is not None:
                    return result
                for key, _ in self._selector.select(timeout=self._settings.timeouts.heartbeat_s / 4):
                    self._handle(key.fileobj, key.data)
                self._check_heartbeats()
        except BaseException as error:
            self._leave(f"its agent ended ({type(error).__name__}: {error})")
            raise
        finally:
            self._sentinel.close()

    def _join(self) -> None:
        if self._settings.spare:
            formed = self._rendezvous_handler.follower.wait_for(
                lambda state: state.generation > 0 or state.phase == Phase.ENDED,
                self._settings.timeouts.join_s,
            )
            if formed is None:
                raise TimeoutError("the job's machines did not come together in time")
        self._rendezvous_handler.join(self._sentinel.address)

    def _handle(self, source: Any, local_rank: int | None) -> None:
        if source is self._wake:
            self._wake.recv(4096)
        elif source is self._standby:
            self._worker_news()
        elif source == self._lifeline:
            raise ConnectionAbortedError("the launcher of this agent is gone")
        elif local_rank is not None:
            self._take_messages(local_rank)

    def _obey(self) -> RunResult | None:
        """Do what the state asks of this machine; the job's result when it has ended."""
        state = self._rendezvous_handler.follower.state
        handler = self._rendezvous_handler
        neighbour = neighbour_of(handler.machine, dict(state.addresses))
        self._sentinel.watch(neighbour, state.addresses.get(neighbour or "", ""))
        order = agent_order(state, machine=handler.machine, launched=handler.launched)
        match order.todo:
            case AgentTodo.STOP:
                self.verdict = state.verdict
                self._stop_workers(self._worker_group)
                ok = state.verdict is not None and state.verdict.ok
                results = {worker.global_rank: None for worker in self._worker_group.workers}
                return RunResult(WorkerState.SUCCEEDED if ok else WorkerState.FAILED, return_values=results)
            case AgentTodo.REJOIN:
                self._stop_workers(self._worker_group)
                handler.rejoin(self._sentinel.address)
            case AgentTodo.LAUNCH:
                self._stop_workers(self._worker_group)
                with contextlib.suppress(RendezvousClosedError, RendezvousStateError):  # overtaken by events
                    self._initialize_workers(self._worker_group)
            case AgentTodo.WAIT:
                self._tell_bare(state)
                self._check_forming(state)
        return None

    def _leave(self, reason: str) -> None:
        """Tell the others at once, instead of letting them find out."""
        self._rendezvous_handler.journal.append(ev.Lost(self._rendezvous_handler.machine, reason))

    # ------------------------------------------------------------------------------------ workers' lives

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        state = self._rendezvous_handler.follower.state
        generation = self._rendezvous_handler.launched or 0
        envs = {
            worker.local_rank: self._env(worker, worker_group, generation) for worker in worker_group.workers
        }
        joins = any(launched != generation for launched in state.launched)
        settings = self._settings
        jobs = {
            rank: WorkerJob(env, settings.target, settings.args, settings.kind, joins=joins)
            for rank, env in envs.items()
        }
        single = state.workers == 1
        prefixes = {
            worker.local_rank: f"[machine {worker_group.group_rank}] "
            if single
            else f"[machine {worker_group.group_rank} rank {worker.global_rank}] "
            for worker in worker_group.workers
        }
        self._processes = StandbyContext(self._standby, jobs, self._logs_specs, prefixes)
        self._pcontext = self._processes
        self._processes.start()
        self._sessions, self._failed, self._told_bare = set(), {}, 0
        self._lines = dict(self._processes.lines)
        for local_rank, line in self._lines.items():
            line.setblocking(False)
            self._heard[local_rank] = time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, data=local_rank)
        return self._processes.pids()

    def _env(self, worker: Any, group: WorkerGroup, generation: int) -> dict[str, str]:
        """What one worker finds in its environment: torchrun's variables and our own."""
        settings = self._settings
        context = WorkerContext(
            run_id=self._rendezvous_handler.get_run_id(),
            host=settings.host,
            port=settings.port,
            machine=self._rendezvous_handler.machine,
            agent_pid=os.getpid(),
            rank=worker.global_rank,
            world=worker.world_size,
            workers=group.spec.local_world_size,
            launched=generation,
            store_mode=settings.store_mode,
            inject=settings.inject,
            helpers=settings.helpers,
            metrics_port=settings.metrics_port,
            profile_out=settings.profile_out,
            address=settings.address,
            timeouts=settings.timeouts,
        )
        env = {
            **context.to_env(),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": group.spec.role,
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        local: dict[str, str | None] = {}
        self._set_local_rank_env(local, worker.local_rank, group.spec)
        return {**env, **{name: value for name, value in local.items() if value is not None}}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        for local_rank in list(self._lines):
            self._hang_up(local_rank)
        if self._processes is not None:
            super()._stop_workers(worker_group)
        self._processes = self._pcontext = None
        self._heard.clear()

    def _hang_up(self, local_rank: int) -> None:
        self._selector.unregister(self._lines.pop(local_rank))

    def _worker_news(self) -> None:
        """A worker ended, or the standby did."""
        news = self._standby.receive()
        if news is None:
            raise ChildProcessError("the standby process died")
        if self._processes is None:
            return
        local_rank = self._processes.take_news(news)
        if local_rank is None:
            return
        self._take_messages(local_rank)  # its last words
        self._worker_ended(local_rank, self._processes.exit_codes[local_rank])

    def _worker_ended(self, local_rank: int, code: int) -> None:
        assert self._processes is not None
        handler = self._rendezvous_handler
        rank = self._worker_group.workers[local_rank].global_rank
        self._heard.pop(local_rank, None)
        if code == 0:
            codes = self._processes.exit_codes
            if len(codes) == len(self._processes.lines) and not any(codes.values()):
                handler.journal.append(ev.Exited(handler.machine, handler.launched or 0))
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            handler.journal.append(ev.Lost(handler.machine, f"worker {rank} {how}"))
        elif not self._found_itself_replaced(local_rank, code):
            words = self._failed.get(local_rank, {})
            reason = words.get("failed", f"exited with code {code}")
            usage = bool(words.get("usage"))
            text = reason if usage else f"worker {rank}: {reason}"
            code = words.get("exit_code", code)
            handler.journal.append(ev.Failed(handler.machine, handler.launched or 0, text, code, usage))

    def _found_itself_replaced(self, local_rank: int, code: int) -> bool:
        """It read that in the journal, so it is no news. A script of its own may end with any code."""
        return code == EXIT_FENCED and local_rank in self._sessions and local_rank not in self._failed

    def _take_messages(self, local_rank: int) -> None:
        """Take all that a worker has said so far."""
        while (line := self._lines.get(local_rank)) is not None:
            try:
                message = receive(line)
            except BlockingIOError:
                return
            if message is None:
                self._hang_up(local_rank)
                return
            self._heard[local_rank] = time.monotonic()
            if "failed" in message:
                self._failed[local_rank] = message
            if "session" in message:
                self._sessions.add(local_rank)

    # -------------------------------------------------------------------------------------- detection

    def _check_heartbeats(self) -> None:
        """A worker that is stopped, or hangs, is killed: its machine then counts as lost."""
        if self._processes is None or self._settings.kind == "program":
            return
        limit = time.monotonic() - self._settings.timeouts.heartbeat_s
        for local_rank, heard in list(self._heard.items()):
            if heard < limit:
                rank = self._worker_group.workers[local_rank].global_rank
                silence = self._settings.timeouts.heartbeat_s
                self._heard.pop(local_rank)
                os.kill(self._processes.pids()[local_rank], signal.SIGKILL)
                self._leave(f"worker {rank} was silent for {silence:g} s")

    def _neighbour_lost(self, machine: str, reason: str) -> None:
        """In the sentinel's thread."""
        state = self._rendezvous_handler.follower.state
        if machine not in state.fenced and state.phase != Phase.ENDED:
            reporter = self._rendezvous_handler.machine
            self._rendezvous_handler.journal.append(ev.Lost(machine, reason, reporter))

    def _tell_bare(self, state: State) -> None:
        """Workers without a session cannot answer for themselves when a generation begins."""
        handler = self._rendezvous_handler
        outdated = handler.launched is not None and handler.launched < state.generation
        bare = len(self._sessions) < state.workers
        if state.phase == Phase.AGREEING and outdated and bare and self._told_bare < state.generation:
            self._told_bare = state.generation
            handler.journal.append(ev.Bare(handler.machine, state.generation))

    def _check_forming(self, state: State) -> None:
        if state.phase != Phase.FORMING:
            self._forming_since = None
            return
        self._forming_since = self._forming_since or time.monotonic()
        if time.monotonic() - self._forming_since > self._settings.timeouts.join_s:
            holes = [slot for slot, member in enumerate(state.members) if member is None]
            self._rendezvous_handler.journal.append(
                ev.Closed(
                    f"no machine came for slots {holes} within {self._settings.timeouts.join_s:g} s; "
                    "start one more `swift-run` with the same --rdzv-endpoint, or keep spares"
                )
            )
