"""A worker's place in the job and its configuration, from one variable of its environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.config.plain_python import NOT_LAUNCHED
from swift_ft.config.run_config import RunConfig
from swift_ft.config.run_plan import plan_from_json
from swift_ft.config.store_address import StoreAddress
from swift_ft.errors import NotLaunchedError
from swift_ft.network import JobSecret, held_secret
from swift_ft.network.secret import secret_in
from swift_ft.plain import from_plain

_CONTEXT = "SWIFT_CONTEXT"


@dataclass(frozen=True, slots=True)
class OfflineReplay:
    """The inputs and the output of a worker that is rebuilt without its job (``swift-recover replay``).

    Attributes:
        store: URL of the run's store. It is read, whatever store the script names.
        out: the folder in which the worker saves its rebuilt state.
        log_since: log segments of generations before this one belong to an abandoned history.
        audit: what differs from what the original sent is noted in that folder.
        gradients: nothing is rebuilt: the worker computes its own gradients of the step after the checkpoint,
            on its own, and their digests are noted in that folder.
    """

    store: str
    out: str
    log_since: int = 0
    audit: bool = False
    gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """A worker's place in the job, and the run's configuration.

    Attributes:
        run_id: name of the run.
        store: where the rendezvous store is.
        machine: the name under which this worker's machine joined.
        address: this host, as the other machines reach it.
        agent_pid: process id of this machine's agent.
        rank: the worker's rank.
        world_size: number of workers.
        workers_per_machine: number of workers on each machine.
        started_in: the generation in which this process was started.
        config: the run's configuration.
        secret: the job's. It is in no variable: a worker gets it through the fork.
        offline: what the worker does without its job; None in a job.
        check: the folder of a check (``--check``); empty in a run that is to train to its end.
        world: the number of its world (`recovery/worlds.py`).
        plan: the layout of its world, as text; empty without one.
        recorded: its records of the iterations before this one are given (`runtime/records.py`).
    """

    run_id: str
    store: StoreAddress
    machine: str
    address: str
    agent_pid: int
    rank: int
    world_size: int
    workers_per_machine: int
    started_in: int
    config: RunConfig
    secret: JobSecret
    offline: OfflineReplay | None = None
    check: str = ""
    world: int = 0
    plan: str = ""
    recorded: int = 0

    @property
    def slot(self) -> int:
        """The machine's slot."""
        return self.rank // self.workers_per_machine

    @property
    def layer_plan(self) -> str | None:
        """The plan of the world's pipelines, as JSON (`config/run_plan.py`); None without one."""
        if self.plan.startswith("{"):
            return self.plan
        # The run's own is one for the machines with which it began.
        if (of_run := self.config.plan) is None or not self.world:
            return of_run
        return of_run if plan_from_json(of_run).workers == self.world_size else None

    def to_env(self) -> dict[str, str]:
        """The context in one variable, and torchelastic's own variables for scripts that read them."""
        return {
            _CONTEXT: json.dumps(self._facts()),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.workers_per_machine),
        }

    def _facts(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        del facts["secret"]
        return facts

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> WorkerContext:
        """Read the context of this process.

        Raises:
            NotLaunchedError: if the process was not started by swift-run.
        """
        if _CONTEXT not in env:
            raise NotLaunchedError(NOT_LAUNCHED)
        facts = json.loads(env[_CONTEXT])
        config = from_plain(RunConfig, facts["config"])
        # A process that its job did not start is no member: a secret that no other one has.
        secret = held_secret() or secret_in(env, config.certificates) or JobSecret.generated()
        return from_plain(cls, {**facts, "config": config, "secret": secret})
