"""How a worker learns its place: the variables that the agent sets, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swift_ft.errors import NotLaunchedError

__all__ = ["EXIT_FENCED", "EXIT_USAGE", "Timeouts", "WorkerContext"]

EXIT_USAGE = 2
"""Exit code of everything that the user can fix."""

EXIT_FENCED = 75
"""Exit code of a worker whose machine was replaced while it was not looking."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every wait has a deadline; these are they, in seconds.

    Attributes:
        heartbeat_s: silence after which a worker or a machine counts as failed.
        report_s: from the opening of a generation until everybody has said where it stands. Covers the start
            of a replacement's script up to its session.
        replay_s: a replay that makes no progress for so long has failed.
        join_s: how long an empty slot may wait for a machine.
        group_s: for the forming of a process group.
        flush_s: for bringing queued log messages to where others can read them after a failure, and for a
            segment that a replay needs and that is not there yet.
        checkpoint_s: at the end of a run, for the last checkpoint.
    """

    heartbeat_s: float = 10.0
    report_s: float = 300.0
    replay_s: float = 300.0
    join_s: float = 600.0
    group_s: float = 300.0
    flush_s: float = 120.0
    checkpoint_s: float = 3600.0

    def to_text(self) -> str:
        """For an environment variable."""
        return ",".join(str(getattr(self, name)) for name in self.__slots__)

    @classmethod
    def from_text(cls, text: str) -> Timeouts:
        """The inverse of :meth:`to_text`."""
        return cls(*map(float, text.split(",")))


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place in the job.

    Attributes:
        run_id: name of the run.
        host: where the rendezvous store is.
        port: the store's port.
        machine: the name under which this worker's machine joined.
        agent_pid: the agent's process on this host.
        rank: the worker.
        world: number of workers.
        workers: workers per machine.
        launched: the generation in which this process was started.
        store_mode: ``""``, ``"resume"`` or ``"fresh"``: what to do with a store that is not empty.
        inject: faults to inject, as text (`testing/faults.py`).
        address: this host, as the other machines reach it.
        profile_out: file that worker 0 writes the profile of the job to; ``""`` for none.
        helpers: survivors that help in one replay at most; None for no limit.
        metrics_port: worker r serves its metrics at this port + r; None for nobody.
        timeouts: all deadlines.
    """

    run_id: str
    host: str
    port: int
    machine: str
    agent_pid: int
    rank: int
    world: int
    workers: int
    launched: int
    store_mode: str
    inject: str
    timeouts: Timeouts
    helpers: int | None = None
    metrics_port: int | None = None
    profile_out: str = ""
    address: str = "127.0.0.1"

    @property
    def slot(self) -> int:
        """The machine's slot."""
        return self.rank // self.workers

    def to_env(self) -> dict[str, str]:
        """The variables that :meth:`from_env` reads. RANK and the like are torchelastic's own."""
        return {
            "TORCHELASTIC_RUN_ID": self.run_id,
            "SWIFT_STORE": f"{self.host}:{self.port}",
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "SWIFT_MACHINE": self.machine,
            "SWIFT_AGENT_PID": str(self.agent_pid),
            "SWIFT_LAUNCHED": str(self.launched),
            "SWIFT_STORE_MODE": self.store_mode,
            "SWIFT_INJECT": self.inject,
            "SWIFT_TIMEOUTS": self.timeouts.to_text(),
            "SWIFT_ADDRESS": self.address,
            "SWIFT_PROFILE_OUT": self.profile_out,
            "SWIFT_HELPERS": "" if self.helpers is None else str(self.helpers),
            "SWIFT_METRICS_PORT": "" if self.metrics_port is None else str(self.metrics_port),
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> WorkerContext:
        """Read the place of this process.

        Raises:
            NotLaunchedError: if the process was not started by swift-run.
        """
        if "SWIFT_MACHINE" not in env:
            raise NotLaunchedError(
                "A swift_ft.Session needs the launcher: start the script with "
                "`swift-run --standalone --machines N script.py` instead of `python` or `torchrun`."
            )
        return cls(
            run_id=env["TORCHELASTIC_RUN_ID"],
            host=env["SWIFT_STORE"].rpartition(":")[0],
            port=int(env["SWIFT_STORE"].rpartition(":")[2]),
            machine=env["SWIFT_MACHINE"],
            agent_pid=int(env["SWIFT_AGENT_PID"]),
            rank=int(env["RANK"]),
            world=int(env["WORLD_SIZE"]),
            workers=int(env["LOCAL_WORLD_SIZE"]),
            launched=int(env["SWIFT_LAUNCHED"]),
            store_mode=env["SWIFT_STORE_MODE"],
            inject=env["SWIFT_INJECT"],
            timeouts=Timeouts.from_text(env["SWIFT_TIMEOUTS"]),
            address=env["SWIFT_ADDRESS"],
            profile_out=env["SWIFT_PROFILE_OUT"],
            helpers=int(env["SWIFT_HELPERS"]) if env["SWIFT_HELPERS"] else None,
            metrics_port=int(env["SWIFT_METRICS_PORT"]) if env["SWIFT_METRICS_PORT"] else None,
        )
