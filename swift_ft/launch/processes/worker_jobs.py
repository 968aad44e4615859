"""The jobs that an agent gives to its workers: program, environment, and labels of their output."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from torch.distributed.elastic.agent.server.api import Worker

from swift_ft.config.worker_context import WorkerContext
from swift_ft.launch.processes.worker import WorkerJob
from swift_ft.launch.settings import AgentSettings


def worker_job(
    settings: AgentSettings,
    worker: Worker,
    torch_env: Mapping[str, str],
    *,
    run_id: str,
    machine: str,
    workers_per_machine: int,
    generation: int,
    joins: bool,
) -> WorkerJob:
    """The job of one worker.

    Args:
        worker: as torchelastic knows it.
        torch_env: torchrun's own variables for it. Ours are added.
        run_id: the run.
        machine: the worker's machine.
        workers_per_machine: on every machine.
        generation: in which it is started.
        joins: the job's other workers are already training.
    """
    assert settings.secret is not None  # agreed on before
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
    )
    env = {**context.to_env(), **torch_env, "TORCHELASTIC_RESTART_COUNT": str(generation)}
    secret = settings.secret.key.hex()
    return WorkerJob(env, settings.target, settings.args, settings.kind, joins=joins, secret=secret)


def output_prefixes(workers: Iterable[Worker], slot: int | None, workers_per_machine: int) -> dict[int, str]:
    """The label at the beginning of each line of a worker's output, by local rank."""
    machine = f"machine {slot}"
    if workers_per_machine == 1:
        return {worker.local_rank: f"[{machine}] " for worker in workers}
    return {worker.local_rank: f"[{machine} rank {worker.global_rank}] " for worker in workers}
