"""The workers of a replay without its job: processes on this host, with a rendezvous store of their own."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swift_ft.config import store_keys
from swift_ft.config.run_config import RunConfig
from swift_ft.config.worker_context import OfflineReplay, WorkerContext
from swift_ft.coordination.agent_channel import channel_pair, receive
from swift_ft.coordination.incarnations import begin
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RecoveryError, UsageError
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.processes.worker import WorkerJob
from swift_ft.launch.rendezvous.store_service import StoreService
from swift_ft.network import JobSecret
from swift_ft.observe.waits import waiting
from swift_ft.offline.replay_plan import GENERATION, ReplayPlan, machine_name, synthetic_journal
from swift_ft.runtime.pipeline.published_shapes import PublishedShapes
from swift_ft.torch_adapters.rendezvous_store import TCPStore, serve_store

_HOST = "127.0.0.1"


def log_name(rank: int) -> str:
    """The file with the output of a worker."""
    return f"rank-{rank:05d}.log"


class ReplayWorkers:
    """Starts the workers of a replay. Make it while the process has a single thread: it forks.

    As a context manager it leaves no process behind.
    """

    def __init__(self) -> None:
        self._service = StoreService(_HOST, 0)
        self._secret = JobSecret.generated()
        self._standby = Standby(close_in_child=self._service.let_go)
        self._bootstrap: TCPStore | None = None
        self._started = False

    def __enter__(self) -> ReplayWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._started:  # it may still be importing torch, for nothing
            os.kill(self._standby.pid, signal.SIGKILL)
        self._standby.close()  # and with it all workers
        self._service.close()

    def run(
        self,
        plan: ReplayPlan,
        run_id: str,
        offline: OfflineReplay,
        script: tuple[str, str, tuple[str, ...]],
        environment: Mapping[str, str],
        on_iteration: Callable[[int, int], None],
        limit_s: float | None = None,
    ) -> None:
        """Replay, and save the state of each worker.

        Args:
            plan: what is replayed.
            run_id: the run that wrote the logs.
            offline: which store is read, and where states are saved.
            script: its kind (``script`` or ``module``), its path or name, and its arguments.
            environment: variables to set for it.
            on_iteration: called with a rank and the iterations that its state has completed.
            limit_s: how long it may take until the next iteration of any worker is complete; None for as long
                as it takes.

        Raises:
            UsageError: the user can fix what is wrong with the script.
            RecoveryError: the replay failed. The field ``machines`` has the slots of those that were rebuilt.
        """
        self._seed_rendezvous(plan, run_id)
        # torch uses no prefix there: it is not the store of the journal.
        self._bootstrap = serve_store(_HOST, 0)
        channels, self._started = {}, True
        for index, rank in enumerate(plan.ranks):
            ours, theirs = channel_pair()
            kind, target, args = script
            job = WorkerJob(
                {**self._env(plan, rank, run_id, offline), **environment},
                target,
                args,
                kind,
                joins=True,
                secret=self._secret.key.hex(),
            )
            log = str(Path(offline.out) / log_name(rank))
            self._standby.launch(job, local_rank=index, stdout=log, stderr=log, channel=theirs)
            channels[rank] = ours
        try:
            failed = self._watch(channels, on_iteration, limit_s)
        finally:
            for channel in channels.values():
                channel.close()
        if failed is not None:
            error = UsageError if failed.get("usage") else RecoveryError
            raise error(failed["failed"], machines=plan.lost)

    def _seed_rendezvous(self, plan: ReplayPlan, run_id: str) -> None:
        """Write what the workers of a job would have left in the rendezvous store for replacements."""
        rendezvous = connect(self._service.address, run_id)
        begin(rendezvous)
        rendezvous.set(store_keys.claimed(), json.dumps({"checkpoints": []}))
        for record in plan.records.values():
            for layout in ((), plan.layout):
                PublishedShapes(rendezvous, layout).publish(record.shapes)
            for key, result in record.setup.items():
                rendezvous.set(key, result)
        for key, note in plan.start_values.items():
            rendezvous.set(key, note)
        journal = open_journal(lambda: connect(self._service.address, run_id), by="swift-recover")
        journal.append(*synthetic_journal(plan))

    def _env(self, plan: ReplayPlan, rank: int, run_id: str, offline: OfflineReplay) -> dict[str, str]:
        assert self._bootstrap is not None
        workers = plan.workers_per_machine
        context = WorkerContext(
            run_id=run_id,
            store=self._service.address,
            machine=machine_name(rank // workers, replaced=True),
            address=_HOST,
            agent_pid=os.getpid(),
            rank=rank,
            world_size=len(plan.records),
            workers_per_machine=workers,
            started_in=GENERATION,
            config=RunConfig(helpers=0),
            secret=self._secret,
            offline=offline,
        )
        return {
            **context.to_env(),
            "LOCAL_RANK": str(rank % workers),
            "GROUP_RANK": str(rank // workers),
            "GROUP_WORLD_SIZE": str(plan.machines),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(plan.records)),
            "ROLE_NAME": "default",
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._bootstrap.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _watch(
        self,
        channels: Mapping[int, socket.socket],
        on_iteration: Callable[[int, int], None],
        limit_s: float | None,
    ) -> dict[str, Any] | None:
        """The first failure; None once all workers have ended with exit code 0."""
        failed: dict[str, Any] | None = None
        completed: dict[int, int] = {}
        until = None if limit_s is None else time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector, waiting("the workers to replay"):
            selector.register(self._standby, selectors.EVENT_READ)
            for rank, channel in channels.items():
                selector.register(channel, selectors.EVENT_READ, data=rank)
            running = len(channels)
            while running and failed is None:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    failed = {"failed": f"no iteration has ended within {limit_s:g} s"}
                for key, _ in selector.select(left):
                    if key.fileobj is self._standby:
                        status = self._status()
                        running -= status is not None
                        if status and failed is None:
                            failed = {"failed": f"a worker ended with exit code {status}"}
                        continue
                    message = receive(channels[key.data])
                    if message is None:
                        selector.unregister(channels[key.data])
                    elif "failed" in message:
                        failed = {**message, "failed": _named(key.data, message["failed"])}
                    elif "iteration" in message.get("beat", {}):
                        iteration = message["beat"]["iteration"]
                        if limit_s is not None and completed.get(key.data) != iteration:
                            until = time.monotonic() + limit_s
                        completed[key.data] = iteration
                        on_iteration(key.data, iteration)
        return failed

    def _status(self) -> int | None:
        """The exit status of a worker that ended; None if the standby reports the start of one.

        Raises:
            ChildProcessError: the standby is gone, and the workers with it.
        """
        report = self._standby.receive()
        if report is None:
            raise ChildProcessError("the standby process died, and the workers with it")
        return report.get("status")


def _named(rank: int, failure: str) -> str:
    """A worker's failure, with its name."""
    return failure if failure.startswith("worker ") else f"worker {rank}: {failure}"
