"""The launcher agent of one machine: torchelastic's local agent with another policy.

When the membership changes, healthy workers that hold a session keep running; they follow the journal
themselves. The agent restarts only workers of a new slot and workers without a session. Its loop waits for
events (journal, workers' messages, exits of processes) and never sleeps.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError

from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from swift_ft.coordination.progress import progress_key
from swift_ft.coordination.relay.lines import RELAY
from swift_ft.errors import FencedError, KeptOutError, RendezvousLostError, UsageError
from swift_ft.launch import signals
from swift_ft.launch.agent.audits import Auditor
from swift_ft.launch.agent.guests import FormingDeadline, Guests
from swift_ft.launch.agent.next_world import NextWorld
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.launch.agent.source_watch import SourceWatch
from swift_ft.launch.agent.status import AgentStatus, WorkerFacts
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.launch.detection.late_workers import LateWorkers
from swift_ft.launch.detection.neighbour_watch import NeighbourWatch
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.launch.detection.worker_watch import WorkerWatch
from swift_ft.launch.health.clocks import CLOCK, read_clocks, tell_time
from swift_ft.launch.health.gate import UnhealthyMachineError, facts_of, pass_gate, reads_clocks
from swift_ft.launch.processes.context import StandbyContext, output_prefixes, worker_jobs
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.launch.schedulers.own_job import end_by_signal
from swift_ft.launch.settings import AgentSettings
from swift_ft.network import Port
from swift_ft.observe.spans import recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.exclusion import deserted_in_words, is_deserted
from swift_ft.recovery.job_state import Phase, State, Verdict
from swift_ft.recovery.orders import AgentTodo, agent_order
from swift_ft.torch_adapters.elastic_agent import ElasticAgent, MachineLogs

_logger = logging.getLogger(__name__)


class _LauncherGoneError(ConnectionAbortedError):
    """All machines of the launcher end with it, and so does its store."""


class MachineAgent(ElasticAgent):
    """Runs one machine's workers from the first rendezvous to the end of the job.

    Args:
        spec: torchelastic's description of the workers; its handler is a :class:`JournalRendezvous`.
        logs_specs: where output goes.
        settings: what the workers run.
        standby: forks the workers.
        wake: the reading end of a socket that gets a byte at each change of the journal.
        run_end: what is left to do for the store when the run is over.
        passed: signals for the workers.
        lifeline: a descriptor that reaches end of file when the process that started this agent is gone.
        status: what is served of this agent, if anything is.
        source_watch: says that the program's files were edited; None if another agent here does.

    Attributes:
        verdict: how the run ended for this machine; None before.
        run_is_over: no machine goes on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: MachineLogs,
        settings: AgentSettings,
        standby: Standby,
        wake: socket.socket,
        run_end: RunEnd,
        passed: signals.PassedSignals,
        lifeline: int | None = None,
        status: AgentStatus | None = None,
        source_watch: SourceWatch | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_s=settings.shutdown_s)
        self._logs = logs_specs
        assert isinstance(spec.rdzv_handler, JournalRendezvous)
        self._settings = settings
        self._standby = standby
        self._membership = spec.rdzv_handler
        assert settings.secret is not None  # agreed on before
        served = {RELAY: self._membership.relay.serve, CLOCK: tell_time}
        self._port = Port(settings.address, settings.secret, served)
        kernel_log = KernelLog()
        self._neighbours = NeighbourWatch(
            spec.rdzv_handler,
            self._port,
            settings.secret,
            kernel_log,
            silence_s=settings.config.machine_silence_s,
        )
        self._wake = wake
        self._run_end = run_end
        self._selector = selectors.DefaultSelector()
        self._passed = passed
        self._lifeline = lifeline
        for source in (wake, standby, passed, lifeline):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        self._heard = WorkerChannels(self._selector, self._hear)
        heard_next = WorkerChannels(self._selector, self._run_end.hear, recorded=self._heard.recorded)
        self._watch = WorkerWatch(
            spec.rdzv_handler,
            self._heard,
            kernel_log,
            heartbeat_timeout_s=settings.config.heartbeat_timeout_s,
            machine_silence_s=settings.config.machine_silence_s,
        )
        self._late = LateWorkers(spec.rdzv_handler, self._heard, settings.config)
        self._next = NextWorld(
            self,
            settings,
            standby,
            spec.rdzv_handler,
            logs_specs,
            heard_next,
            self._note_report,
            self._watch.oom_kills,
        )
        elastic_wait_s = settings.config.elastic_wait_s
        self._guests = Guests(standby, spec.rdzv_handler, elastic_wait_s)
        self._auditor = Auditor(settings, standby, spec.rdzv_handler, self._selector)
        self._forming = FormingDeadline(spec.rdzv_handler, settings.config.join_timeout_s, elastic_wait_s)
        self._sessionless_in = 0
        self._stopping = False  # by a signal
        self._prepared = False  # workers that wait for a slot
        self._rejoin_at: float | None = None
        self._processes: StandbyContext | None = None
        self._status = status
        self._source_watch = source_watch
        self.verdict: Verdict | None = None
        self.run_is_over = False

    # ------------------------------------------------------------------------------------------ the loop

    def supervise(self) -> RunResult:
        """Follow the journal's orders until the job has ended."""
        try:
            self._join()
            while True:
                if self._status is not None:
                    self._status.turn(self._worker_facts)
                if self._source_watch is not None:
                    self._source_watch.look(self._membership.follower.state.generation)
                result = self._obey()
                if result is not None:
                    return result
                self._turn(self._pause_s())
                self._watch_workers()
                for rank, facts in self._heard.shown.items():
                    self._membership.journal.note(progress_key(rank), facts)
        except signals.SignalException as error:
            return self._hand_over(error.sigval)
        except (KeptOutError, UsageError, FencedError):  # the journal says so, or it was never in it
            raise
        except _LauncherGoneError:  # nobody is left to hear of it, and a report would wait for the store
            raise
        except RendezvousLostError:  # nothing can be reported
            self._run_end.archive(self._settings.shutdown_s)
            raise
        except BaseException as error:
            self._watch.report_loss(f"its agent ended ({type(error).__name__}: {error})", Cause.RUNTIME)
            raise
        finally:
            self._auditor.stop()
            self._neighbours.close()
            self._port.close()

    def _turn(self, pause_s: float) -> None:
        """Wait for the next events, and handle them."""
        for key, _ in self._selector.select(timeout=pause_s):
            self._handle(key.fileobj, key.data)

    def _pause_s(self) -> float:
        """Until something may be due that no event tells of."""
        deadlines = [at for at in (self._rejoin_at, self._guests.due_at) if at is not None]
        pauses = self._watch.pause_s, self._next.pause_s, self._late.pause_s
        return max(0.0, min([*pauses, *(at - time.monotonic() for at in deadlines)]))

    def _worker_facts(self) -> list[WorkerFacts]:
        """Called by threads that serve them."""
        ranks = {worker.local_rank: worker.global_rank for worker in self.workers}
        ages, beats = self._heard.ages(), self._heard.beats
        return [WorkerFacts(ranks[i], age, beats.get(i, {})) for i, age in sorted(ages.items()) if i in ranks]

    def _hand_over(self, number: signal.Signals) -> RunResult:
        """A signal stops this launcher: Ctrl-C ends the run, and all others take this machine out of it."""
        signals.ignore_stop_signals()
        membership, ending = self._membership, end_by_signal(number)
        reason = ending.reason
        left = f"this machine left the run: {reason}"
        ended: State | None = None
        with contextlib.suppress(RendezvousLostError):
            if number == signal.SIGINT:
                state, left = membership.follower.append(ending), reason
            else:
                self._let_scripts_end(number)
                left_by = ev.MachineLost(
                    machine=membership.machine,
                    reason=reason,
                    stopped_by=number,
                    cause=ending.cause,
                    evidence=ending.evidence,
                    recorded=self._watch.recorded(),
                )
                state = membership.follower.append(left_by)
                if not state.membership.members and not state.membership.spares:  # no machine is left
                    state = membership.follower.append(ending)
            self.run_is_over = state.phase == Phase.ENDED
            ended = state if self.run_is_over else None
        self._stop(number)
        if ended is not None:
            self._end(ended)
        self.verdict = Verdict(False, left, 128 + number)
        return self._result(ok=False)

    def _close_deserted(self, state: State) -> RunResult | None:
        """Close a run that has no machine any more, so that the next launchers begin another one."""
        reason = deserted_in_words(state)
        ending = ev.JobClosed(reason=reason, exit_code=EXIT_KEPT_OUT, cause=Cause.MACHINE)
        self._membership.follower.append(ending)
        return self._obey()

    def _let_scripts_end(self, number: signal.Signals) -> None:
        """Let scripts end that handle a signal which stops this launcher.

        They may save, or agree with the others to end after a step, as they do under torchrun. Once the
        journal calls the machine lost its workers end in the middle of that, so it hears of it afterwards.
        """
        self._stopping = True
        if self._processes is not None:
            # The launcher of this agent, or the standby, may go meanwhile: the workers end with these.
            with contextlib.suppress(_LauncherGoneError, ChildProcessError):
                self._processes.let_scripts_end(number, self._settings.shutdown_s, self._turn)

    def _end(self, state: State) -> None:
        """The job has ended, and this machine's workers have."""
        limit_s = self._settings.shutdown_s
        self._run_end.tidy(state, state.slot_of(self._membership.machine), limit_s)
        self._guests.wait_for_end(limit_s)

    def _leave(self) -> RunResult:
        """Leave the run, as somebody asked or because this is a guest: a spare takes this machine's place."""
        membership = self._membership
        reason = "it was a guest" if membership.host else "it was drained"
        if membership.machine not in membership.follower.state.membership.left:
            leaves = ev.MachineLost(
                machine=membership.machine,
                reason=reason,
                on_request=True,
                recorded=self._watch.recorded(),
            )
            membership.follower.append(leaves)
        self._stop()
        self.verdict = Verdict(True, f"this machine left the run: {reason}")
        return self._result(ok=True)

    def _join(self) -> None:
        if self._settings.spare:
            limit_s = self._settings.config.join_timeout_s
            formed = self._membership.follower.wait_for(
                lambda state: state.generation > 0 or state.phase == Phase.ENDED, limit_s
            )
            if formed is None:
                raise TimeoutError(f"the job did not start within {limit_s:g} s: some machines did not join")
        self._show_health(after_loss=False)
        self._membership.join(self._port.address)

    def _show_health(self, *, after_loss: bool) -> None:
        """Pass the health checks that are asked for. A guest has passed them as its host.

        Raises:
            UnhealthyMachineError: it has failed one. Its place is another machine's.
        """
        membership, config = self._membership, self._settings.config
        # A guest's host trains at this moment, and the checks would take its devices from it.
        if membership.host or not config.health_checks:
            return
        state = membership.follower.state
        others, workers = sorted(state.membership.addresses.values()), state.shape.workers_per_machine
        assert self._settings.secret is not None
        reads = reads_clocks(config.health_checks)
        clocks = read_clocks(others, self._settings.secret) if reads else ()
        facts = facts_of(membership.machine, others, workers, after_loss=after_loss, clocks=clocks)
        try:
            pass_gate(config.health_checks, facts)
        except UnhealthyMachineError as error:
            with contextlib.suppress(RendezvousLostError):
                membership.stay_out(str(error), after_loss=after_loss)
            raise

    def _handle(self, source: Any, read: Callable[[], None] | None) -> None:
        if source is self._wake:
            self._wake.recv(4096)
        elif source is self._standby:
            self._read_standby()
        elif source is self._passed:
            self._pass_signals_on()
        elif source == self._lifeline:
            raise _LauncherGoneError("the launcher of this agent is gone")
        elif read is not None:
            read()

    def _obey(self) -> RunResult | None:
        """Do what the state asks of this machine; returns the job's result when it has ended."""
        membership = self._membership
        state = membership.follower.state
        self._auditor.look(state)  # first of all: a spare that is needed has its processors for itself
        self._neighbours.look(state)
        if self._next.look(state, self._processes.pids().values() if self._processes else ()):
            if membership.machine in state.membership.slots:
                self._adopt(state)
            else:  # it was lost right after the switch
                self._next.drop()
        order = agent_order(state, machine=membership.machine, started_in=membership.started_in)
        match order.todo:
            case AgentTodo.STOP:
                signals.ignore_stop_signals()
                verdict = self.verdict = state.verdict
                self._stop(
                    signals.signal_of_end(verdict.reason, verdict.exit_code) if verdict else signal.SIGTERM
                )
                self._end(state)
                self.run_is_over = True
                return self._result(ok=verdict is not None and verdict.ok)
            case AgentTodo.REFUSED:
                self._stop()
                if not is_deserted(state):
                    raise KeptOutError(order.reason)
                return self._close_deserted(state)
            case AgentTodo.LEAVE:
                return self._leave()
            case AgentTodo.RETIRE:
                self._stop(signal.SIGKILL)
                membership.started_in, self._prepared = None, False
            case AgentTodo.REJOIN:
                self._stop()
                self._rejoin(order.wait_s)
            case AgentTodo.LAUNCH if self._joins_others(state, order.generation) and membership.has_changed():
                changed = "its script or its setup has changed since it joined"
                self._watch.report_loss(changed, Cause.SCRIPT)
            case AgentTodo.LAUNCH:
                with recorder.span("stop the workers before"):
                    self._stop()
                with contextlib.suppress(RendezvousClosedError, RendezvousStateError):  # outdated
                    with recorder.span("start workers", generation=order.generation):
                        self.start_workers()
                    assert self._processes is not None
                    self._prepared = False
                    self._heard.open(self._processes.channels)
                    membership.serve(self._processes.lines.values())
                    self._sessionless_in = 0
            case AgentTodo.WAIT if self._has_lost_bootstrap(state):
                server = membership.bootstrap.server
                self._watch.report_loss(
                    f"its workers' init_process_group needs a store that was lost with {server}",
                    Cause.RUNTIME,
                    starts_again=True,
                )
            case AgentTodo.WAIT:
                self._prepare(state)
                self._report_sessionless(state)
                self._guests.check(state, self._processes.pids().values() if self._processes else ())
                self._forming.check(state)
        return None

    def _adopt(self, state: State) -> None:
        """The next world has taken over: its workers here are this machine's."""
        group, processes = self._next.leave_to_agent()
        self._stop(signal.SIGKILL)  # by now they have ended themselves
        self.replace_workers(group, processes)
        self._processes = processes
        self._heard.take_over(self._next.heard)
        self._neighbours.tell_records(self._watch.recorded())
        # Not the newest one of its slot: all processes may have been started again since.
        self._membership.started_in = self._next.started_in
        self._membership.bootstrap.next_takes_over(state.worlds.present)
        self._sessionless_in, self._prepared = 0, False
        for local_rank, code in processes.exit_codes.items():  # it ended as its world took over
            self._report_end(local_rank, code, processes)

    def _has_lost_bootstrap(self, state: State) -> bool:
        """Whether workers may wait for a lost machine in ``init_process_group``, which tries again for long.

        Without any session all workers start again together.
        """
        fenced = self._membership.bootstrap.server in state.membership.fenced
        return fenced and state.has_sessions and self._heard.without_session() > 0

    def _result(self, *, ok: bool) -> RunResult:
        results = {worker.global_rank: None for worker in self.workers}
        return RunResult(WorkerState.SUCCEEDED if ok else WorkerState.FAILED, return_values=results)

    def _rejoin(self, wait_s: float) -> None:
        """Join under a new name, now or once the machine has stayed away for so long."""
        now = time.monotonic()
        if self._rejoin_at is None:
            self._rejoin_at = now + wait_s
            if wait_s:
                _logger.warning(
                    "this machine was lost again and again: it stays away for %.0f s. If no line above says "
                    "why: can the others connect to %s, and are its memory and its disk in order?",
                    wait_s,
                    self._port.address,
                    extra={"event": "machine_stays_away"},
                )
        # Another one may be lost meanwhile, so that this machine is needed.
        if now >= self._rejoin_at or not wait_s:
            self._rejoin_at = None
            self._show_health(after_loss=True)
            self._membership.rejoin(self._port.address)

    # ------------------------------------------------------------------------------------ start and stop

    def make_processes(self) -> StandbyContext:
        """The workers of the generation that this machine was just given a slot in."""
        state = self._membership.follower.state
        generation = self._membership.started_in or 0
        workers_per_machine = state.shape.workers_per_machine
        jobs = worker_jobs(
            self._settings,
            self.workers,
            self.torch_env,
            run_id=self._membership.get_run_id(),
            machine=self._membership.machine,
            workers_per_machine=workers_per_machine,
            generation=generation,
            joins=self._joins_others(state, generation),
            tries=state.tries,
            world=state.worlds.present,
            recorded=self._heard.recorded_with(state.membership.recorded),
        )
        self._logs.generation = generation
        prefixes = output_prefixes(self.workers, self.group_rank, workers_per_machine)
        self._processes = StandbyContext(self._standby, jobs, self._logs, prefixes, on_other=self._next.note)
        return self._processes

    def _prepare(self, state: State) -> None:
        """A spare's workers are forked before it gets a slot.

        While others recover on the processors of the same host, it waits: they would take longer.
        """
        recovering = state.phase in (Phase.AGREEING, Phase.RECOVERING)
        if recovering and self._settings.config.on_one_host:
            return
        if not self._prepared and self._membership.machine in state.membership.spares:
            self._standby.prepare(state.shape.workers_per_machine)
            self._membership.bootstrap.prepare()
            self._prepared = True

    def _joins_others(self, state: State, generation: int) -> bool:
        """Whether other workers were started before those that are started in a generation."""
        return any(started_in != generation for started_in in state.membership.started_in.values())

    def _stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        self._next.drop()
        self._heard.close()
        self.stop_workers(by)
        self._processes = None
        self._heard.heartbeats.forget_all()

    # ------------------------------------------------------------------------------- messages and exits

    def _read_standby(self) -> None:
        """A worker ended, or the standby did."""
        report = self._standby.receive()
        if report is None:
            raise ChildProcessError("the standby process died")
        if not self._next.note(report):
            self._note_report(report)

    def _note_report(self, report: dict[str, int]) -> None:
        """A report of the standby that is not of workers of the next world."""
        if self._processes is None:
            return
        if "stopped" in report:
            self._watch.stopped()
        local_rank = self._processes.note(report)
        if local_rank is None or self._stopping:
            return
        self._heard.read(local_rank)  # those that it sent before it ended
        self._report_end(local_rank, self._processes.exit_codes[local_rank], self._processes)

    def _report_end(self, local_rank: int, code: int, processes: StandbyContext) -> None:
        rank, said = self.workers[local_rank].global_rank, processes.stderrs[local_rank]
        self._watch.ended(local_rank, rank, code, said, processes.pids()[local_rank])

    def _hear(self, message: dict[str, Any]) -> None:
        """A worker has said something."""
        self._run_end.hear(message)
        if "recorded" in message:
            self._neighbours.tell_records(self._watch.recorded())

    def _pass_signals_on(self) -> None:
        running = self._processes.running() if self._processes is not None else {}
        workers = {self.workers[local_rank].global_rank: pid for local_rank, pid in running.items()}
        self._passed.pass_on(workers, [pid for pid in self._standby.guests.values() if pid])

    def _watch_workers(self) -> None:
        processes = self._processes if self._settings.kind != "program" else None
        ranks = {worker.local_rank: worker.global_rank for worker in self.workers}
        self._watch.check(processes, ranks, self._read_standby)
        self._late.look(ranks)

    def _report_sessionless(self, state: State) -> None:
        """Workers without a session cannot report their own status when a generation begins."""
        membership = self._membership
        outdated = membership.started_in is not None and membership.started_in < state.generation
        sessionless = len(self._heard.sessions) < state.shape.workers_per_machine
        reported = self._sessionless_in >= state.generation
        if state.phase == Phase.AGREEING and outdated and sessionless and not reported:
            self._sessionless_in = state.generation
            membership.journal.append(
                ev.SessionlessWorkers(
                    machine=membership.machine, generation=state.generation, ran_s=self._heard.ran_s
                )
            )
