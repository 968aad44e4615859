"""The private parts of torchelastic's agent on which :mod:`swift_ft.torch_adapters.elastic_agent` relies."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from swift_ft.torch_adapters.elastic_agent import ElasticAgent, MachineLogs


class Processes:
    """Takes part as torchelastic's process context does."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def pids(self) -> dict[int, int]:
        return {0: 100, 1: 101}

    def close(self, death_sig: signal.Signals, timeout: int) -> None:
        self.calls.append(f"{death_sig.name}, killed after {timeout} s")


class Agent(ElasticAgent):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs(), shutdown_s=1)
        self.processes = Processes()
        self.env: list[dict[str, str]] = []

    def make_processes(self) -> PContext:
        self.env = [self.torch_env(worker, worker.local_rank) for worker in self.workers]
        return cast(PContext, self.processes)

    def supervise(self) -> RunResult:
        self.start_workers()
        self.stop_workers()
        self.stop_workers()  # nothing is left to stop
        return RunResult(WorkerState.SUCCEEDED, return_values={2: None, 3: None})


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The agent of the second of three machines."""
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    place = RendezvousInfo(HashStore(), 1, 3, RendezvousStoreInfo("host", 5))
    rendezvous: Any = SimpleNamespace(
        next_rendezvous=lambda: place,
        get_run_id=lambda: "run",
        get_backend=lambda: "test",
        shutdown=lambda: True,
        use_agent_store=True,
    )
    return Agent(WorkerSpec("default", 2, rendezvous, entrypoint="script.py", max_restarts=4))


def test_run_calls_the_hooks_of_the_subclass(agent: Agent) -> None:
    assert agent.run().state == WorkerState.SUCCEEDED
    assert agent.processes.calls == ["start", "SIGTERM, killed after 1 s"]


def test_workers_have_their_ranks_when_processes_are_made(agent: Agent) -> None:
    agent.start_workers()
    assert agent.group_rank == 1
    assert [(w.local_rank, w.global_rank, w.world_size) for w in agent.workers] == [(0, 2, 6), (1, 3, 6)]
    assert [w.id for w in agent.workers] == [100, 101]


def test_the_environment_is_torchruns(agent: Agent) -> None:
    agent.start_workers()
    assert [env["LOCAL_RANK"] for env in agent.env] == ["0", "1"]
    assert (
        agent.env[1].items()
        >= {
            "MASTER_ADDR": "host",
            "MASTER_PORT": "5",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_RANK": "3",
            "ROLE_WORLD_SIZE": "6",
            "ROLE_NAME": "default",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }.items()
    )


def test_logs_are_found_by_run_and_machine(tmp_path: Any) -> None:
    env = {"TORCHELASTIC_RUN_ID": "run7", "GROUP_RANK": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    logs = MachineLogs(log_dir=str(tmp_path), tee=Std.OUT)
    logs.generation = 3
    destination = logs.reify({0: env})
    place = f"{tmp_path}/run7/machine-2/attempt_3/0/"
    assert destination.error_files[0].startswith(place)
    assert env["TORCHELASTIC_ERROR_FILE"] == destination.error_files[0]
    assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert destination.stdouts[0] == f"{place}stdout.log"
    assert logs.shown == ({0: f"{place}stdout.log"}, {})
    assert destination.tee_stdouts == {}  # torchelastic would show them, too
