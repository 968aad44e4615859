"""torchelastic's local agent with public hooks: the policy and the processes are a subclass's.

torchelastic has no public extension points for either; tested on torch 2.11 to 2.14.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from abc import abstractmethod
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, PContext


class ElasticAgent(LocalElasticAgent):
    """Runs one machine's workers; a subclass says when they start and stop, and what runs them.

    Args:
        spec: torchelastic's description of the workers.
        logs_specs: where their output goes.
        shutdown_s: seconds that workers get to end before they are killed.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, *, shutdown_s: int) -> None:
        super().__init__(spec, logs_specs)
        self._shutdown_s = shutdown_s
        self.logs_specs = logs_specs

    @abstractmethod
    def supervise(self) -> RunResult:
        """Run the job until it ends. Called once, by ``run()``."""

    @abstractmethod
    def make_processes(self) -> PContext:
        """The workers' processes, not started yet. Called by :meth:`start_workers` once ranks are known."""

    @property
    def workers(self) -> list[Worker]:
        """The machine's workers, by local rank. Their ranks are those of the last rendezvous."""
        return list(self._worker_group.workers)

    @property
    def group_rank(self) -> int | None:
        """The machine's rank among the machines: its slot. None before the first rendezvous."""
        return self._worker_group.group_rank

    def start_workers(self) -> None:
        """Take part in the next rendezvous, then start the workers.

        Raises:
            RendezvousClosedError, RendezvousStateError: from the rendezvous.
        """
        self._initialize_workers(self._worker_group)

    def stop_workers(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask the workers to end, if any run, and end those that do not in time.

        Args:
            by: the signal that asks them.
        """
        self._shutdown(by)
        self._pcontext = None

    def workers_in(self, slot: int, machines: int, master: tuple[str, int]) -> WorkerGroup:
        """Workers for a slot that no rendezvous has given to this machine yet.

        Args:
            slot: the machine's number among the machines.
            machines: how many there will be.
            master: the address and the port of the store for ``init_process_group``.
        """
        group, count = WorkerGroup(self._worker_group.spec), self._worker_group.spec.local_world_size
        group.workers = [
            Worker(i, slot * count + i, slot * count + i, machines * count, machines * count)
            for i in range(count)
        ]
        found = {"group_rank": slot, "group_world_size": machines}
        for name, value in {**found, "master_addr": master[0], "master_port": master[1]}.items():
            setattr(group, name, value)  # torch declares that they are None
        return group

    def replace_workers(self, group: WorkerGroup, processes: PContext) -> None:
        """Have these workers from now on. Those before have been stopped."""
        self._worker_group, self._pcontext = group, processes

    def torch_env(self, worker: Worker, local_rank: int, group: WorkerGroup | None = None) -> dict[str, str]:
        """Torchrun's own variables for one worker that follow from the rendezvous.

        Args:
            worker: which.
            local_rank: its number on its host.
            group: the workers of its machine; None for the present ones.
        """
        group = group or self._worker_group
        env: dict[str, str | None] = {
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": group.spec.role,
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._set_local_rank_env(env, local_rank, group.spec)
        return {name: value for name, value in env.items() if value is not None}

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self.supervise()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Torch's own knows no time before 2.12, and ends watchers that there are none of."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._shutdown_s)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pcontext = self.make_processes()
        self._pcontext.start()
        return self._pcontext.pids()


class MachineLogs(DefaultLogsSpecs):
    """torchelastic's log directories, under the names of the run and the machine's slot.

    Attributes:
        shown: files of the last :meth:`reify` that are to be shown, by local rank: of output, and of errors.
            torchelastic is not told of them, and shows none.
        generation: in which the next workers are started.
    """

    shown: tuple[dict[int, str], dict[int, str]] = ({}, {})
    generation = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """``<log_dir>/<run_id>/machine-<slot>/attempt_<generation>/<local_rank>/stdout.log``."""
        if self._root_log_dir != os.devnull:
            place = f"{envs[0]['TORCHELASTIC_RUN_ID']}/machine-{envs[0]['GROUP_RANK']}"
            self._run_log_dir = f"{self._root_log_dir}/{place}"  # type: ignore[assignment]  # torch says None
        # Torch names the folder by the restarts, and empties it: a replacement would delete what is there.
        by_generation = {"TORCHELASTIC_RESTART_COUNT": str(self.generation)}
        named = {local_rank: {**env, **by_generation} for local_rank, env in envs.items()}
        destinations = super().reify(named)
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = named[local_rank]["TORCHELASTIC_ERROR_FILE"]
        self.shown = destinations.tee_stdouts, destinations.tee_stderrs
        return dataclasses.replace(destinations, tee_stdouts={}, tee_stderrs={})
