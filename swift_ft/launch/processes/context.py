"""The workers of one machine, as torchelastic's process context, and their jobs. The standby forks them."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import channel_pair
from swift_ft.coordination.relay.lines import LocalLine, local_pair
from swift_ft.errors import UsageError
from swift_ft.launch.processes.output_tail import OutputTail, Shown
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.processes.worker import WorkerJob
from swift_ft.launch.settings import AgentSettings
from swift_ft.launch.signals import handles
from swift_ft.network.command_proof import is_proved
from swift_ft.observe.spans import recorder
from swift_ft.observe.waits import waiting
from swift_ft.recovery.job_state import Tries
from swift_ft.recovery.worlds import World
from swift_ft.torch_adapters.elastic_agent import MachineLogs

_POLL_S = 0.01
_KILL_S = 5.0


class StandbyContext(PContext):
    """One machine's set of running workers: their pids, channels, logs and exit codes.

    Args:
        standby: forks them.
        jobs: what they run, by local rank.
        logs_specs: where their output goes, by torchelastic's rules.
        prefixes: what precedes each line of a worker's output, by local rank.
        first: the number under which the standby knows the first one: two sets may run at once.
        on_other: called with a report of the standby that is of none of them.
    """

    def __init__(
        self,
        standby: Standby,
        jobs: dict[int, WorkerJob],
        logs_specs: MachineLogs,
        prefixes: dict[int, str],
        *,
        first: int = 0,
        on_other: Callable[[dict[str, int]], object] = lambda _: None,
    ) -> None:
        super().__init__(
            name="worker",
            entrypoint=jobs[0].target,
            args={rank: job.args for rank, job in jobs.items()},
            envs={rank: job.env for rank, job in jobs.items()},
            logs_specs=logs_specs,
        )
        streams = zip(logs_specs.shown, (sys.stdout, sys.stderr), strict=True)
        self._shown = [
            Shown(path, output, prefixes[local_rank])
            for paths, output in streams
            for local_rank, path in paths.items()
        ]
        self._tail: OutputTail | None = None
        self._standby = standby
        self._jobs = jobs
        self._first = first
        self.on_other = on_other
        self._pids: dict[int, int] = {}
        self.channels: dict[int, socket.socket] = {}
        self.lines: dict[int, LocalLine] = {}
        self.exit_codes: dict[int, int] = {}

    def _start(self) -> None:
        self._tail = OutputTail(self._shown) if self._shown else None
        with recorder.span("fork workers"):
            self._fork()

    def _fork(self) -> None:
        for local_rank, job in self._jobs.items():
            ours, theirs = channel_pair()
            self.channels[local_rank] = ours
            our_end, line = local_pair()
            self.lines[local_rank] = LocalLine(our_end)
            self._standby.launch(
                job,
                local_rank=self._first + local_rank,
                stdout=self.stdouts[local_rank],
                stderr=self.stderrs[local_rank],
                channel=theirs,
                line=line,
            )
        with waiting("the standby process to start the workers"):
            while len(self._pids) < self.nprocs:
                self.note(self._standby.receive())

    def note(self, report: dict[str, int] | None) -> int | None:
        """Note a start or an end that the standby reports. Returns the local rank of the worker that ended.

        Raises:
            ChildProcessError: if the standby is gone, and with it the workers.
        """
        if report is None:
            raise ChildProcessError("the standby process died, and the workers with it")
        if not self.owns(report):
            self.on_other(report)
            return None
        if "local_rank" in report:
            self._pids[report["local_rank"] - self._first] = report["started"]
            return None
        for local_rank, pid in self._pids.items():
            if pid == report.get("ended"):
                self.exit_codes[local_rank] = report["status"]
                return local_rank
        return None

    def owns(self, report: Mapping[str, int]) -> bool:
        """Whether a report of the standby is of one of these workers."""
        if "local_rank" in report:
            return 0 <= report["local_rank"] - self._first < self.nprocs
        return report.get("ended", report.get("stopped")) in self._pids.values()

    def _poll(self) -> RunProcsResult | None:
        failures = {
            rank: ProcessFailure(rank, self._pids[rank], code, self.error_files[rank])
            for rank, code in self.exit_codes.items()
            if code != 0
        }
        if failures or len(self.exit_codes) == self.nprocs:
            return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)
        return None

    def pids(self) -> dict[int, int]:
        """Pids by local rank."""
        return dict(self._pids)

    def running(self) -> dict[int, int]:
        """Pids of those that have not ended, by local rank."""
        return {rank: pid for rank, pid in self._pids.items() if rank not in self.exit_codes}

    def kill(self, local_rank: int) -> None:
        """Kill a worker, unless it has ended already, which the standby may not have reported yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[local_rank], signal.SIGKILL)

    def let_scripts_end(self, number: signal.Signals, limit_s: float, turn: Callable[[float], None]) -> None:
        """Pass a signal on that stops the launcher, and wait for scripts that handle it.

        Args:
            number: the signal.
            limit_s: scripts that take longer are killed.
            turn: notes what happens meanwhile, for at most so many seconds.
        """
        handled = {local_rank: pid for local_rank, pid in self.running().items() if handles(pid, number)}
        for pid in handled.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit_s
        with waiting(f"the scripts here to end, which handle {number.name}", limit_s):
            while left := handled.keys() & self.running().keys():
                if (left_s := deadline - time.monotonic()) <= 0:
                    for local_rank in left:
                        self.kill(local_rank)
                    return
                turn(left_s)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Signal the workers that still run, wait for them, and kill those that remain."""
        deadline = time.monotonic() + timeout
        stopped = bool(self.running())
        self._signal_running(death_sig)
        self._signal_running(signal.SIGCONT)  # a stopped worker must get the signal too
        while self.running() and time.monotonic() < deadline:
            self._wait_for_report()
        self._signal_running(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S  # a report may be lost where a signal interrupted the launcher
        while self.running() and time.monotonic() < deadline:
            self._wait_for_report()
        if stopped:
            self._standby.kill_strays()
        for channel in self.channels.values():
            channel.close()
        for line in self.lines.values():
            line.close()
        if self._tail is not None:
            self._tail.stop()

    def _signal_running(self, number: int) -> None:
        for pid in self.running().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_for_report(self) -> None:
        if not select.select([self._standby], [], [], _POLL_S)[0]:
            return
        report = self._standby.receive()
        if report is None:  # the standby is gone and took the workers with it
            self.exit_codes.update(dict.fromkeys(self._pids, -int(signal.SIGKILL)))
        else:
            self.note(report)


def worker_jobs(
    settings: AgentSettings,
    workers: Iterable[Worker],
    torch_env: Callable[[Worker, int], Mapping[str, str]],
    *,
    run_id: str,
    machine: str,
    workers_per_machine: int,
    generation: int,
    joins: bool,
    tries: Tries,
    world: World,
    recorded: Mapping[int, int],
) -> dict[int, WorkerJob]:
    """The jobs of one machine's workers, by local rank.

    Args:
        workers: as torchelastic knows them.
        torch_env: torchrun's own variables for a worker and its number on its host. Ours are added.
        run_id: the run.
        machine: the workers' machine.
        workers_per_machine: on every machine.
        generation: in which they are started.
        joins: the job's other workers are already training.
        tries: how often all workers were started again, and how often a script that fails still may be.
        world: what they are part of.
        recorded: by rank, the iteration before which the worker's records are known to be given.

    Raises:
        UsageError: somebody who does not know the job's secret has asked for the world's command.
    """
    assert settings.secret is not None  # agreed on before
    if world.command and not is_proved(world.proof, settings.secret, run_id, world.command):
        raise UsageError(
            f"the command {shlex.join(world.command)!r} is not from a member of this job: give swift-recover "
            "the run's --token-file"
        )
    target, *args = world.command or (settings.target, *settings.args)
    jobs = {}
    for worker in workers:
        context = WorkerContext(
            run_id=run_id,
            store=settings.store,
            machine=machine,
            address=settings.address,
            agent_pid=os.getpid(),
            rank=worker.global_rank,
            world_size=worker.world_size,
            workers_per_machine=workers_per_machine,
            started_in=generation,
            config=settings.config,
            secret=settings.secret,
            check=settings.check,
            world=world.number,
            plan=world.plan,
            recorded=recorded.get(worker.global_rank, 0),
        )
        number = _number_on_host(settings, worker.local_rank, workers_per_machine)
        # Torch makes it a part of the names of all keys by which the workers of one start meet. A worker
        # that comes alone must not meet those of an earlier or a later start: zeros change the name alone.
        zeros = generation + 1 if joins else 1
        restarts = {
            "TORCHELASTIC_RESTART_COUNT": f"{tries.restarts:0{zeros}d}",
            # As in torchrun, the difference is what is left: a restart after a loss uses none of it up.
            "TORCHELASTIC_MAX_RESTARTS": str(tries.restarts + tries.restarts_left),
        }
        jobs[worker.local_rank] = WorkerJob(
            {**context.to_env(), **torch_env(worker, number), **restarts},
            target,
            tuple(args),
            settings.kind,
            beat_s=settings.config.worker_beat_s,
            joins=joins,
            secret=settings.secret.key.hex(),
            sources=world.sources,
        )
    return jobs


def _number_on_host(settings: AgentSettings, local_rank: int, workers_per_machine: int) -> int:
    """A worker's number on its host. Those of guests come after the host's own, so that ports differ.

    Where there are accelerators, and none is left, it shares that of one of the host's workers.
    """
    own = settings.guest_number * workers_per_machine + local_rank
    devices = torch.accelerator.device_count() if settings.guest_number else 0
    return own if own < devices or not devices else local_rank


def output_prefixes(workers: Iterable[Worker], slot: int | None, workers_per_machine: int) -> dict[int, str]:
    """The label at the beginning of each line of a worker's output, by local rank."""
    machine = f"machine {slot}"
    if workers_per_machine == 1:
        return {worker.local_rank: f"[{machine}] " for worker in workers}
    return {worker.local_rank: f"[{machine} rank {worker.global_rank}] " for worker in workers}
