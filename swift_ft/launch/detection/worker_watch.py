"""The watch over an agent's own workers, and its reports of their ends and their silence."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from swift_ft.config import detection_timings as timings
from swift_ft.config.exit_codes import EXIT_FENCED
from swift_ft.host.signal_names import signal_in, signal_name
from swift_ft.launch.detection.kernel import (
    STOPPED_BY_SIGNAL,
    WAITS_IN_KERNEL,
    OomKills,
    is_stopped,
    process_state,
)
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.launch.detection.policy import StoppedWorkers
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.launch.processes.context import StandbyContext
from swift_ft.launch.processes.output_tail import last_lines
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.observe.spans import recorder
from swift_ft.program.secrets import without_secrets
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause, cause_of_signal
from swift_ft.units import counted

_logger = logging.getLogger(__name__)

_BLAMED = (Cause.DEVICE, Cause.NETWORK, Cause.STORE)
"""Causes that a script's own error may name, and of which the kernel may know more."""

_BROKEN_DEVICE = "uncorrectable"
"""In CUDA's words for an error of a device's memory, or of its links, that it could not mend."""


class WorkerWatch:
    """Reports the ends of one machine's workers, and ends those that are silent.

    Owner: the agent's main thread.

    Args:
        membership: this machine's, with the journal that gets the reports.
        heard: what the workers say.
        kernel_log: what the kernel says.
        heartbeat_timeout_s: how long a worker may be silent, before the state's patience multiplies it.
        machine_silence_s: how long a worker may be stopped by a signal, likewise.
    """

    def __init__(
        self,
        membership: JournalRendezvous,
        heard: WorkerChannels,
        kernel_log: KernelLog,
        *,
        heartbeat_timeout_s: float,
        machine_silence_s: float,
    ) -> None:
        self._membership = membership
        self._heard = heard
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._machine_silence_s = machine_silence_s
        self._stopped = StoppedWorkers()
        self.oom_kills = OomKills()
        self._kernel_log = kernel_log

    @property
    def pause_s(self) -> float:
        """The longest time between two calls of :meth:`check`."""
        rarely_s = self._heartbeat_timeout_s / timings.HEARTBEAT_LOOKS
        often_s = self._machine_silence_s / timings.STOPPED_LOOKS
        return min(rarely_s, often_s) if self._stopped.some else rarely_s

    def stopped(self) -> None:
        """A signal has stopped some worker. Call :meth:`check` at once."""
        self._stopped.tell()

    def report_loss(
        self,
        reason: str,
        cause: Cause | None = None,
        evidence: Sequence[str] = (),
        *,
        starts_again: bool = False,
    ) -> None:
        """Report this machine's loss at once, so that the other machines need not detect it.

        Args:
            reason: how it was lost.
            cause: whose fault that is, where it is known.
            evidence: what else was seen.
            starts_again: it is on purpose, and no failure.
        """
        machine = self._membership.machine
        recorder.begin()
        with recorder.span("detect", machine=machine):
            self._membership.journal.append(
                ev.MachineLost(
                    machine=machine,
                    reason=reason,
                    starts_again=starts_again,
                    cause=cause or "",
                    evidence=tuple(evidence),
                    ran_s=self._heard.ran_s,
                    recorded=self.recorded(),
                )
            )

    def recorded(self) -> tuple[int, ...]:
        """By local rank, up to where the workers have given their records; empty if none has."""
        state, heard = self._membership.follower.state, self._heard.recorded
        slot = state.slot_of(self._membership.machine) if heard else None
        return () if slot is None else tuple(heard.get(rank, 0) for rank in state.ranks_of(slot))

    def _report_death(
        self, reason: str, cause: Cause, evidence: Sequence[str], pid: int, *, killed: bool
    ) -> None:
        """Report a loss by a signal, and whether it was the kernel's for want of memory.

        Args:
            killed: it may have been, by that signal and the kernel's messages.
        """
        if why := self.oom_kills.why(killed=killed):
            self.report_loss(f"{reason}: {why}", Cause.MEMORY, evidence)
        else:
            self.report_loss(reason, self._kernel_log.hardware(pid, cause), evidence)

    def ended(self, local_rank: int, rank: int, code: int, said: str = "", pid: int = 0) -> None:
        """Report a worker's end.

        Args:
            local_rank: its number on this machine.
            rank: its number in the job.
            code: its exit code; the number of a signal, negated.
            said: the path of the file with what it has written to stderr; empty if there is none.
            pid: its process.
        """
        membership = self._membership
        generation = membership.started_in or 0
        self._heard.heartbeats.forget(local_rank)
        if code == 0 and (cause := self._heard.interrupted.get(local_rank)):
            self.report_loss(
                f"worker {rank}: its script has ended with exit code 0 where it was interrupted ({cause}): "
                "its process starts again",
                starts_again=True,
            )
        elif code == 0:
            membership.journal.post(
                ev.ScriptExited(
                    machine=membership.machine,
                    started_in=generation,
                    rank=rank,
                    iteration=self._heard.iteration(local_rank),
                )
            )
        elif (number := signal_in(code)) and (code < 0 or local_rank not in self._heard.failed):
            name = signal_name(number)
            how = f"was killed by {name}" if code < 0 else f"exited with code {code}, as after {name}"
            evidence = self._evidence(local_rank, said, pid)
            # Of a command in a shell the kernel has another number.
            killed = number == signal.SIGKILL and (code > 0 or self._kernel_log.may_have_killed(pid))
            self._report_death(f"worker {rank} {how}", cause_of_signal(name), evidence, pid, killed=killed)
        elif (lost := self._heard.lost.get(local_rank)) is not None and lost.get("starts_again"):
            self.report_loss(f"worker {rank}: {lost['lost']}", starts_again=True)
        elif lost is not None:
            evidence = self._evidence(local_rank, said, pid)
            cause = Cause(lost["cause"])  # of a process that the script had started
            self._report_death(
                f"worker {rank}: {lost['lost']}", cause, evidence, pid, killed=cause == Cause.SIGNAL
            )
        elif self._has_lost_its_device(local_rank, pid):
            message = self._heard.failed[local_rank]
            evidence = (*message.get("at", ()), *self._progress(local_rank), *self._kernel_log.evidence(pid))
            self.report_loss(without_secrets(f"worker {rank}: {message['failed']}"), Cause.DEVICE, evidence)
        elif not self._found_itself_replaced(local_rank, code):
            message = self._heard.failed.get(local_rank, {})
            reason = message.get("failed", f"exited with code {code}")
            usage = bool(message.get("usage"))
            membership.journal.append(
                ev.ScriptFailed(
                    machine=membership.machine,
                    started_in=generation,
                    reason=without_secrets(reason if usage else f"worker {rank}: {reason}"),
                    exit_code=message.get("exit_code", code),
                    usage=usage,
                    differs=bool(message.get("differs")),
                    alike=bool(message.get("alike")),
                    iteration=self._heard.iteration(local_rank),
                    cause=message.get("cause", ""),
                    evidence=(
                        *map(without_secrets, message.get("at", ())),
                        *self._progress(local_rank),
                        *self._said_by_kernel(message.get("cause", "")),
                        *(() if message else last_lines(said)),
                    ),
                )
            )
        if code != 0:
            self._kernel_log.forget()

    def _evidence(self, local_rank: int, said: str, pid: int) -> tuple[str, ...]:
        """The facts of a worker's end by a signal: how far it was, where, and its last lines on stderr."""
        heard = [f"heard last {far}" for far in self._progress(local_rank)]
        stack = self._heard.stacks.get(local_rank)
        place = stack.read() if stack is not None else ()
        return (*heard, *place, *self._kernel_log.evidence(pid), *last_lines(said))

    def _said_by_kernel(self, cause: str) -> tuple[str, ...]:
        """The kernel's messages on what an error of the script blames: a device, a link, or a disk."""
        return self._kernel_log.evidence(causes=[one for one in _BLAMED if one == cause])

    def _progress(self, local_rank: int) -> list[str]:
        iteration = self._heard.iteration(local_rank)
        return [] if iteration is None else [f"after {counted(iteration, 'iteration')}"]

    def _has_lost_its_device(self, local_rank: int, pid: int) -> bool:
        """Whether its script failed because the machine's device is broken: another machine can go on.

        Most errors of CUDA are a program's own. So are all without a session: only a restart helps them.
        """
        message = self._heard.failed.get(local_rank, {})
        if message.get("cause") != Cause.DEVICE or local_rank not in self._heard.sessions:
            return False
        is_broken = self._kernel_log.hardware(pid, Cause.SIGNAL) == Cause.DEVICE
        return is_broken or _BROKEN_DEVICE in message["failed"]

    def _found_itself_replaced(self, local_rank: int, code: int) -> bool:
        """The worker read of its replacement in the journal, which needs no report.

        The code alone does not show it: a user's script may exit with any code.
        """
        return (
            code == EXIT_FENCED
            and local_rank in self._heard.sessions
            and local_rank not in self._heard.failed
        )

    def check(
        self, processes: StandbyContext | None, ranks: Mapping[int, int], read_exits: Callable[[], None]
    ) -> None:
        """Kill a worker that is stopped or hangs. The machine then counts as lost.

        Args:
            processes: the workers; None if none runs that could be silent.
            ranks: their ranks in the job, by local rank.
            read_exits: notes in `processes` which have ended.
        """
        self.oom_kills.look()
        self._look_at_kernel_log(processes)
        state = self._membership.follower.state
        silence_s = self._heartbeat_timeout_s * state.patience
        silent = self._heard.silent(silence_s)
        if processes is None:
            return
        stopped_s = self._machine_silence_s * state.machine_patience
        for local_rank in self._stopped_for(stopped_s, processes):
            self._heard.heartbeats.forget(local_rank)
            reason = f"worker {ranks[local_rank]} was stopped by a signal for {stopped_s:g} s"
            self.report_loss(reason, Cause.SIGNAL)
            self._kill(local_rank, ranks[local_rank], processes)
        for local_rank in silent:
            if local_rank in self._heard.ages():
                self._give_up(local_rank, ranks[local_rank], silence_s, processes, read_exits)

    def _look_at_kernel_log(self, processes: StandbyContext | None) -> None:
        pids = processes.pids() if processes is not None else {}
        running = processes.running() if processes is not None else {}
        self._kernel_log.look([*pids.values()], [pid for rank, pid in pids.items() if rank not in running])

    def _stopped_for(self, limit_s: float, processes: StandbyContext) -> list[int]:
        """Workers that a signal has stopped for as long as it may. A debugger's stop is left alone."""
        now = time.monotonic()
        if not self._stopped.is_due(now):
            return []
        ages = self._heard.ages()
        stopped = {
            local_rank: pid
            for local_rank, pid in processes.pids().items()
            if local_rank in ages and process_state(pid) == STOPPED_BY_SIGNAL
        }
        return self._stopped.look(now, stopped, ages, limit_s)

    def _give_up(
        self,
        local_rank: int,
        rank: int,
        silence_s: float,
        processes: StandbyContext,
        read_exits: Callable[[], None],
    ) -> None:
        """Report a silent worker as lost, and kill it. An answer in between: the deadline was too short."""
        self._heard.heartbeats.forget(local_rank)
        pid = processes.pids()[local_rank]
        letter, stopped = process_state(pid), is_stopped(pid)
        place = [] if stopped else self._place_of(local_rank)
        # It may have read something at that moment: one that waits in the kernel does so for long.
        if letter == WAITS_IN_KERNEL and (place or process_state(pid) != WAITS_IN_KERNEL):
            letter = ""
        how, cause = self._why_silent(letter)
        self.report_loss(
            f"worker {rank} was silent for {silence_s:g} s: {how}",
            cause,
            (*self._progress(local_rank), *place, *self._kernel_log.evidence(pid)),
        )
        self._kernel_log.forget()
        if not stopped and self._answers(local_rank, silence_s, processes, read_exits):
            machine = self._membership.machine
            self._membership.journal.append(ev.WorkerCameBack(machine=machine, rank=rank))
            _logger.warning(
                "worker %d came back after more than %g s: if its script has calls that take so long, raise "
                "--heartbeat-timeout",
                rank,
                silence_s,
                extra={"event": "worker_came_back", "rank": rank},
            )
        self._kill(local_rank, rank, processes)

    def _why_silent(self, letter: str) -> tuple[str, Cause]:
        """The reason of a silence by the state of the process, and whose fault that is."""
        if letter in {*"Tt"}:
            return "a signal or a debugger has stopped it", Cause.SIGNAL
        if letter == WAITS_IN_KERNEL:
            blamed = (one for one in (Cause.DEVICE, Cause.STORE) if self._kernel_log.evidence(causes=[one]))
            return "it waits in the kernel, for a disk, a mount or a driver", next(blamed, Cause.MACHINE)
        return (
            "it is stopped, or in a call that holds the interpreter for longer than --heartbeat-timeout",
            Cause.SCRIPT,
        )

    def _place_of(self, local_rank: int) -> list[str]:
        stack = self._heard.stacks.get(local_rank)
        return stack.ask(timings.STACK_S) if stack is not None else []

    def _kill(self, local_rank: int, rank: int, processes: StandbyContext) -> None:
        _logger.debug("worker %d was silent and is killed", rank, extra={"event": "worker_silent"})
        processes.kill(local_rank)

    def _answers(
        self, local_rank: int, limit_s: float, processes: StandbyContext, read_exits: Callable[[], None]
    ) -> bool:
        """Whether a worker sends anything in time, or ends because it has read that it was replaced."""
        if (heard := self._heard.hears_within(local_rank, limit_s)) is not None:
            return heard
        read_exits()
        return processes.exit_codes.get(local_rank) == EXIT_FENCED
