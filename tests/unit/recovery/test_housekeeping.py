"""What is kept of checkpoints, who decides about the store, and what an agent tells of ended workers."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.config import EXIT_FENCED, WorkerContext
from swift_ft.launch.agent import MachineAgent
from swift_ft.logging import Store
from swift_ft.recovery import claim
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import CheckpointFolder

# --------------------------------------------------------------------------------------------- clean


@pytest.fixture
def folder(tmp_path: object) -> CheckpointFolder:
    return CheckpointFolder(Store(str(tmp_path)))


def save(folder: CheckpointFolder, iteration: int, *generations: int, committed: bool = True) -> None:
    """Parts of rank 0, one per generation; the marker names the last one."""
    for generation in generations:
        folder.store.write_json(f"{folder.part(iteration, 0, generation)}/data.json", {})
    if committed:
        folder.commit(iteration, {0: folder.part(iteration, 0, generations[-1])}, "run")


def left(folder: CheckpointFolder) -> dict[str, list[str]]:
    names = sorted(folder.store.list("checkpoints"))
    return {name: sorted(folder.store.list(f"checkpoints/{name}")) for name in names}


def test_the_newest_that_everybody_knows_of_are_kept(folder: CheckpointFolder) -> None:
    for iteration in (10, 20, 30, 40):
        save(folder, iteration, 1)
    folder.clean(keep=2, known=40)
    assert folder.committed() == [30, 40]


def test_a_marker_that_nobody_told_of_does_not_count(folder: CheckpointFolder) -> None:
    """Its writer died before telling: everybody would return to the one before it, which must stay."""
    save(folder, 20, 1)
    save(folder, 30, 1)
    save(folder, 40, 1)
    folder.clean(keep=1, known=30)
    assert folder.committed() == [30, 40]


def test_parts_that_never_became_a_checkpoint_go(folder: CheckpointFolder) -> None:
    save(folder, 10, 1, committed=False)
    save(folder, 20, 1, 2)  # a fenced writer's part, beside its successor's
    save(folder, 30, 2, committed=False)  # still being written
    folder.clean(keep=2, known=20)
    assert left(folder) == {
        "00000020": ["committed.json", "rank-00000.g00002"],
        "00000030": ["rank-00000.g00002"],
    }


def test_orphans_beside_a_marker_that_nobody_told_of_stay(folder: CheckpointFolder) -> None:
    save(folder, 20, 1)
    save(folder, 30, 1, 2)
    folder.clean(keep=1, known=20)
    assert left(folder)["00000030"] == ["committed.json", "rank-00000.g00001", "rank-00000.g00002"]


def test_what_is_no_checkpoint_is_left_alone(folder: CheckpointFolder) -> None:
    save(folder, 10, 1)
    save(folder, 20, 1)
    folder.store.write_json("checkpoints/notes/mine.json", {})
    folder.clean(keep=1, known=20)
    assert sorted(left(folder)) == ["00000020", "notes"]


# --------------------------------------------------------------------------------------------- claim


class Rendezvous:
    """The keys of a rendezvous store that a claim needs."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError(f"no {keys} within {timeout}")


def claimed(folder: CheckpointFolder, rendezvous: Rendezvous, rank: int, mode: str = "resume") -> int | None:
    context = SimpleNamespace(rank=rank, run_id="second", store_mode=mode)
    return claim.claim_store(
        folder.store, cast(WorkerContext, context), cast(Any, rendezvous), {"machines": 2}, 1.0
    )


def test_worker_0_tells_which_checkpoint_there_is(folder: CheckpointFolder) -> None:
    folder.store.write_json("run.json", {"run_id": "first", "topology": {"machines": 2}, "earlier": []})
    save(folder, 20, 1)
    rendezvous = Rendezvous()
    assert claimed(folder, rendezvous, 0) == 20
    assert claimed(folder, rendezvous, 1) is None
    assert folder.store.read_json("run.json") == {
        "run_id": "second",
        "topology": {"machines": 2},
        "earlier": ["first"],
    }


def test_the_replacement_of_worker_0_finds_what_was_decided(folder: CheckpointFolder) -> None:
    """The first one may have died before it told: its replacement tells the same, whatever came since."""
    folder.store.write_json("run.json", {"run_id": "first", "topology": {"machines": 2}, "earlier": []})
    save(folder, 20, 1)
    rendezvous = Rendezvous()
    claimed(folder, rendezvous, 0)
    save(folder, 30, 1)
    assert claimed(folder, rendezvous, 0) == 20
    assert json.loads(rendezvous.values["claimed"]) == {"checkpoint": 20}


def test_an_empty_store_holds_no_checkpoint(folder: CheckpointFolder) -> None:
    rendezvous = Rendezvous()
    assert claimed(folder, rendezvous, 0, mode="") is None
    assert claimed(folder, rendezvous, 0, mode="") is None


# -------------------------------------------------------------------------------------- ended workers


class StandIn:
    """As much of an agent as the news of an ended worker concerns."""

    _found_itself_replaced = MachineAgent._found_itself_replaced

    def __init__(self, *codes: int, sessions: bool = True) -> None:
        self.told: list[ev.Event] = []
        journal = SimpleNamespace(append=self.told.append)
        self._rendezvous_handler = SimpleNamespace(machine="A", launched=3, journal=journal)
        workers = [SimpleNamespace(global_rank=4 + i) for i in range(len(codes))]
        self._worker_group = SimpleNamespace(workers=workers)
        self._processes = SimpleNamespace(
            exit_codes=dict(enumerate(codes)), lines=dict.fromkeys(range(len(codes)))
        )
        self._heard: dict[int, float] = {}
        self._sessions = {*range(len(codes))} if sessions else set()
        self._failed: dict[int, dict[str, Any]] = {}


def told_of(agent: StandIn, local_rank: int = 0) -> list[ev.Event]:
    MachineAgent._worker_ended(cast(MachineAgent, agent), local_rank, agent._processes.exit_codes[local_rank])
    return agent.told


def test_a_worker_that_found_itself_replaced_is_no_news() -> None:
    assert told_of(StandIn(EXIT_FENCED)) == []


def test_a_script_may_end_with_any_code() -> None:
    without_session = told_of(StandIn(EXIT_FENCED, sessions=False))
    assert without_session == [ev.Failed("A", 3, f"worker 4: exited with code {EXIT_FENCED}", EXIT_FENCED)]
    own_code = StandIn(EXIT_FENCED)
    own_code._failed[0] = {"failed": "the script exited", "exit_code": EXIT_FENCED}
    assert told_of(own_code) == [ev.Failed("A", 3, "worker 4: the script exited", EXIT_FENCED)]


def test_how_workers_end() -> None:
    assert told_of(StandIn(-9)) == [ev.Lost("A", "worker 4 was killed by SIGKILL")]
    assert told_of(StandIn(1)) == [ev.Failed("A", 3, "worker 4: exited with code 1")]
    assert told_of(StandIn(0, 0)) == [ev.Exited("A", 3)]
    assert told_of(StandIn(0, EXIT_FENCED)) == []
