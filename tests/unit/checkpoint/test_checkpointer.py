"""Saving and loading a worker's part while the store fails, and what damaged or forged parts can do."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import MANIFEST, write_manifest
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, DamagedCheckpointError
from swift_ft.faults import failpoints
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.digest import digest_of_file
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import staged, write_part

DEADLINE_S = 60.0
PART = "checkpoints/00000010/rank-00000.g00001"


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store behind a network that loses connections: for a number of opens, or for all while it is down."""

    protocol = "flaky"
    failures: ClassVar[int] = 0
    down: ClassVar[bool] = False
    suffix: ClassVar[str] = ""
    mode: ClassVar[str] = "wb"
    attempted: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("flaky:/")))

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        cls = type(self)
        if mode == cls.mode and path.endswith(cls.suffix):
            cls.attempted.set()
            if cls.down or cls.failures:
                cls.failures = max(0, cls.failures - 1)
                raise ConnectionResetError(104, "Connection reset by peer")
        return super()._open(path, mode, *args, **options)


@pytest.fixture
def flaky() -> Iterator[type[FlakyFileSystem]]:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    cls = FlakyFileSystem
    cls.failures, cls.down, cls.suffix, cls.mode, cls.attempted = 0, False, "", "wb", threading.Event()
    yield cls
    cls.failures, cls.down = 0, False


@pytest.fixture(autouse=True)
def no_listener() -> Iterator[None]:
    yield
    failpoints.listen(None)


@pytest.fixture
def store(flaky: type[FlakyFileSystem]) -> Store:
    return Store(f"flaky://{uuid.uuid4().hex}")


class Worker:
    """A state, and what its checkpointer reports."""

    def __init__(self, store: Store) -> None:
        self.model = nn.Linear(20, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()
        self.reported: list[Any] = []
        state = TrainingState({"model": self.model, "optimizer": self.optimizer})
        self.checkpointer = Checkpointer(CheckpointFolder(store), state)
        failpoints.listen(lambda _point, iteration, _part: self.reported.append(iteration))

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 20)).sum().backward()
        self.optimizer.step()

    def save(self, iteration: int) -> None:
        folder = self.checkpointer.folder
        path = folder.part(iteration, 0, 1)

        def durable(digest: str) -> None:
            self.reported.append(path)
            folder.commit(iteration, {0: path}, "run", {path: digest})

        self.checkpointer.save(iteration, path, durable)

    def tensors(self) -> list[torch.Tensor]:
        moments = [v for state in self.optimizer.state.values() for v in state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the checkpointer reports to the user."""
    return [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "checkpoint_failed"]


def assert_holds(store: Store, iteration: int, tensors: list[torch.Tensor]) -> None:
    reader = Worker(store)
    reader.checkpointer.load(iteration, 0)
    assert all(torch.equal(a, b) for a, b in zip(reader.tensors(), tensors, strict=True))


@pytest.mark.parametrize("suffix", [".distcp", ".metadata.tmp"])
def test_a_save_outlasts_an_outage(suffix: str, flaky: type[FlakyFileSystem], store: Store) -> None:
    """And what is written in the end is the state at the save, not what training has made of it since."""
    worker = Worker(store)
    at_save = worker.tensors()
    flaky.suffix, flaky.failures = suffix, 3
    worker.save(10)
    worker.train()
    assert worker.checkpointer.wait(DEADLINE_S)
    assert flaky.failures == 0
    assert worker.reported == [10, PART]
    assert_holds(store, 10, at_save)


def test_a_save_outlasts_a_store_that_goes_away_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that is lost takes the folder along that was just made: then a file cannot be made in it."""
    place, away = tmp_path / "store", tmp_path / "away"
    store = Store(place)
    store.write_json("run.json", {})
    store.anchor("run.json")
    worker = Worker(store)
    gone = threading.Event()

    def write(store: Store, path: str, *args: Any, **options: Any) -> Any:
        if not gone.is_set():
            place.rename(away)
            gone.set()
            (place / path / ".metadata.tmp").touch()  # it raises
        return write_part(store, path, *args, **options)

    monkeypatch.setattr("swift_ft.checkpoint.checkpointer.write_part", write)
    worker.save(10)
    assert gone.wait(DEADLINE_S)
    away.rename(place)
    assert worker.checkpointer.wait(DEADLINE_S)
    assert worker.checkpointer.folder.committed() == [10]


def test_training_does_not_wait_for_a_store_that_is_down(
    flaky: type[FlakyFileSystem], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The next save takes the place of one that only waits for its store."""
    worker = Worker(store)
    flaky.down = True
    worker.save(10)
    assert flaky.attempted.wait(DEADLINE_S)
    worker.train()
    at_save = worker.tensors()
    worker.save(20)
    flaky.down = False
    assert worker.checkpointer.wait(DEADLINE_S)
    assert worker.reported == [20, PART.replace("10", "20", 1)]
    assert_holds(store, 20, at_save)
    (warned,) = failures(caplog)
    assert "iteration 10 could not be written" in warned
    assert "Connection reset by peer" in warned


def test_saves_that_follow_each_other_closely_are_all_written(store: Store) -> None:
    worker = Worker(store)
    for iteration in (10, 20, 30, 40):
        worker.save(iteration)
    assert worker.checkpointer.wait(DEADLINE_S)
    assert worker.checkpointer.folder.committed() == [10, 20, 30, 40]


def test_a_state_that_cannot_be_copied_leaves_a_checkpointer_that_works(
    flaky: type[FlakyFileSystem], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(store)
    flaky.down = True
    worker.save(10)

    def refuse(state: Any) -> Any:
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as patched:
        patched.setattr("swift_ft.checkpoint.checkpointer.staged", refuse)
        with pytest.raises(MemoryError):
            worker.save(20)
    flaky.down = False
    worker.save(30)
    assert worker.checkpointer.wait(DEADLINE_S)
    assert worker.checkpointer.folder.committed() == [30]


@pytest.mark.parametrize("failures", [0, 2])
def test_a_copy_is_let_go(failures: int, flaky: type[FlakyFileSystem], store: Store) -> None:
    """DCP leaves circles behind that refer to it; the next save's copy would be a second one."""
    worker, copies = marked(store)
    gc.disable()
    try:
        flaky.failures = failures
        worker.save(10)
        assert worker.checkpointer.wait(DEADLINE_S)
        assert copies() == 0
    finally:
        gc.enable()


def test_one_copy_at_a_time(flaky: type[FlakyFileSystem], store: Store) -> None:
    """Also when the next save takes the place of one that waits for its store."""
    worker, copies = marked(store)
    gc.disable()
    try:
        flaky.down = True
        for iteration in (10, 20, 30):
            worker.save(iteration)
            assert copies() == 1
        flaky.down = False
        assert worker.checkpointer.wait(DEADLINE_S)
        assert worker.reported[0] == 30
        assert copies() == 0
    finally:
        gc.enable()


def marked(store: Store) -> tuple[Worker, Callable[[], int]]:
    """A worker with a tensor of a shape that no other has, and how many copies there are of it."""
    worker = Worker(store)
    worker.model.register_buffer("marked", torch.zeros(4321))

    def copies() -> int:
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        return sum(1 for tensor in tensors if tensor.shape == (4321,)) - 1

    gc.collect()
    assert copies() == 0
    return worker, copies


def test_a_save_that_cannot_succeed_is_a_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(store)
    monkeypatch.setattr(FlakyFileSystem, "_open", _refuse)
    worker.save(10)
    assert worker.checkpointer.wait(DEADLINE_S)
    assert worker.reported == []
    (warned,) = failures(caplog)
    assert "iteration 10 could not be written" in warned


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this store is read-only")


def test_a_disk_that_is_full_for_a_while(
    flaky: type[FlakyFileSystem], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(store)
    whole = FlakyFileSystem._open
    left = [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")]

    def full(self: FlakyFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and left:
            raise left.pop()
        return whole(self, path, mode, **options)

    monkeypatch.setattr(FlakyFileSystem, "_open", full)
    worker.save(10)
    assert worker.checkpointer.wait(DEADLINE_S)
    assert left == []
    assert worker.reported == [10, PART]


# ------------------------------------------------------------------------------------------------- loading


def saved(store: Store) -> list[torch.Tensor]:
    worker = Worker(store)
    worker.save(10)
    assert worker.checkpointer.wait(DEADLINE_S)
    return worker.tensors()


@pytest.mark.parametrize("suffix", [".distcp", ".metadata"])
def test_a_load_outlasts_an_outage(suffix: str, flaky: type[FlakyFileSystem], store: Store) -> None:
    tensors = saved(store)
    flaky.mode, flaky.suffix, flaky.failures = "rb", suffix, 3
    assert_holds(store, 10, tensors)
    assert flaky.failures == 0


class Forged:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["SWIFT_TEST_PROOF"],)


def forge_digests(store: Path) -> None:
    """Those of the part as it is now: they prove nothing against who forges them, too."""
    files = {}
    for path in (store / PART).iterdir():
        with path.open("rb") as file:
            files[path.name] = digest_of_file(file)
    del files[MANIFEST]
    folder = CheckpointFolder(Store(str(store)))
    folder.commit(10, {0: PART}, "run", {PART: write_manifest(folder.store, PART, files)})


@pytest.mark.parametrize("where", ["description", "bytes"])
def test_a_forged_part_executes_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "proof"
    monkeypatch.setenv("SWIFT_TEST_PROOF", str(proof))
    store = Store(str(tmp_path / "store"))
    saved(store)
    if where == "description":
        (tmp_path / "store" / PART / ".metadata").write_bytes(pickle.dumps(Forged()))
    else:
        state = TrainingState({"model": nn.Linear(20, 20)}).to_save()
        write_part(store, PART, staged(state) | {"plain": {"bytes": Forged()}})
    forge_digests(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"names posix.mkdir|[Uu]nsupported"):
        Worker(store).checkpointer.load(10, 0)
    assert not proof.exists()


def test_credentials_of_the_url_are_in_no_file_and_no_error(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"memory://user:se@cret@{uuid.uuid4().hex}/run")
    saved(store)
    files = fsspec.filesystem("memory").find("/")
    assert any(file.endswith(".metadata") for file in files)
    for file in files:
        assert b"cret" not in fsspec.filesystem("memory").cat_file(file)
    store.delete(f"{PART}/.metadata")
    with pytest.raises(CheckpointError) as caught:
        Worker(store).checkpointer.load(10, 0)
    assert "cret" not in str(caught.value)
    assert not [w for w in recwarn if "cret" in str(w.message)]
    assert "cret" not in caplog.text


# ------------------------------------------------------------------------------------------------- markers


def test_a_repeated_commit_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be cut off by the end of its process, and would leave a temporary file beside the marker."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    folder.commit(20, {0: "a"}, "run", {"a": "1"})

    def refuse(self: Store, path: str, content: dict[str, Any]) -> None:
        raise AssertionError(f"{path} is written again")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write_json", refuse)
        folder.commit(20, {0: "a"}, "run", {"a": "1"})
    folder.commit(
        20, {0: "b"}, "run", {"b": "2"}
    )  # of a later generation: the earlier one was never reported
    assert folder.part_of(20, 0) == SavedPart("b", "2")


def test_the_marker_that_another_worker_writes_right_now_is_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    for iteration in (10, 20):
        folder.commit(iteration, {}, "run", {})
        folder.store.write_json(f"checkpoints/{iteration:08d}/committed.json.0123456789ab.tmp", {})
    folder.clean((10, 20), 1, "run")
    assert folder.store.list("checkpoints/00000010") == ["committed.json"]
    assert folder.store.list("checkpoints/00000020") == ["committed.json", "committed.json.0123456789ab.tmp"]
    folder.commit(30, {}, "run", {})
    folder.clean((20, 30), 1, "run")
    assert folder.store.list("checkpoints/00000020") == ["committed.json"]


def test_the_end_of_a_run_leaves_only_what_markers_name(tmp_path: Path) -> None:
    """Worker 0 may have been killed while it wrote a marker, and another one while it saved its part."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    part = folder.part(20, rank=0, generation=2)
    folder.commit(20, {0: part}, "run", {})
    for left in (folder.part(20, rank=0, generation=1), part, "checkpoints/00000020/committed.json.01.tmp"):
        folder.store.write_json(f"{left}/.metadata" if "rank" in left else left, {})
    folder.tidy({0: 2})
    assert folder.store.list("checkpoints/00000020") == ["committed.json", "rank-00000.g00002"]


def test_the_end_of_a_run_leaves_no_parts_of_killed_processes(tmp_path: Path) -> None:
    """Worker 0 was killed while it saved its part, and no other worker has the state of that iteration."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    saving = {30: [(0, 1), (4, 3)], 40: [(0, 1), (0, 2), (1, 1), (2, 3), (4, 3)]}
    for iteration, parts in saving.items():
        for rank, generation in parts:
            folder.store.write_json(f"{folder.part(iteration, rank, generation)}/digests.json.01.tmp", {})
    folder.store.write_json("checkpoints/00000040/committed.json.01.tmp", {})
    folder.tidy({0: 3, 1: 1, 2: 3, 3: 1}, workers=4)
    assert folder.store.list("checkpoints") == ["00000040"]
    assert folder.store.list("checkpoints/00000040") == ["rank-00001.g00001", "rank-00002.g00003"]


def test_the_end_of_a_run_looks_for_checkpoints_once_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store behind a network takes its time for each look."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    folder.commit(20, {0: folder.part(20, rank=0, generation=1)}, "run", {})
    folder.store.write_json(f"{folder.part(30, rank=0, generation=1)}/.metadata", {})
    looks = []

    def listed(self: Store, directory: str) -> list[str]:
        looks.append(directory)
        return all_of(self, directory)

    all_of = Store.list
    monkeypatch.setattr(Store, "list", listed)
    folder.tidy({0: 2})
    assert looks.count("checkpoints") == 2  # the committed ones, and all others
    assert all_of(folder.store, "checkpoints") == ["00000020"]


def test_parts_of_killed_processes_go_while_others_save(tmp_path: Path) -> None:
    """A folder without any other part stays: another worker may be about to write there."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    committed = folder.part(20, rank=1, generation=1)  # a replacement's one may follow it at any time
    folder.commit(20, {0: folder.part(20, rank=0, generation=2)}, "run", {})
    dead, living = folder.part(40, rank=1, generation=1), folder.part(40, rank=0, generation=2)
    alone = folder.part(50, rank=1, generation=1)
    for part in (committed, dead, living, alone):
        folder.store.write_json(f"{part}/digests.json.01.tmp", {})
    folder.delete_dead({0: 1, 1: 2})
    assert [folder.store.exists(part) for part in (committed, dead, living, alone)] == [
        True,
        False,
        True,
        False,
    ]
    assert folder.store.list("checkpoints") == ["00000020", "00000040", "00000050"]


def test_the_end_of_a_run_whose_number_of_workers_is_unknown(tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    part = folder.part(40, rank=4, generation=1)
    folder.store.write_json(f"{part}/digests.json", {})
    folder.tidy({0: 3})
    assert folder.store.exists(part)


def test_a_state_that_is_not_what_was_saved(tmp_path: Path) -> None:
    """The bytes in the store are those that were written, and the state that comes of them is another one."""
    state, folder = TrainingState({"model": nn.Linear(2, 2)}), CheckpointFolder(Store(str(tmp_path)))
    digests = tensor_digests(state.named_tensors())
    loads = {}
    for rank, expected in enumerate((digests, {**digests, "model.bias": 7})):
        durable = threading.Event()
        saved: list[str] = []

        def note(digest: str, saved: list[str] = saved, durable: threading.Event = durable) -> None:
            saved.append(digest)
            durable.set()

        checkpointer, path = Checkpointer(folder, state), folder.part(10, rank, 1)
        checkpointer.save(10, path, note, expected)
        assert durable.wait(DEADLINE_S)
        assert checkpointer.wait(DEADLINE_S)
        loads[rank] = (path, saved[0])
    folder.commit(10, {r: path for r, (path, _) in loads.items()}, "run", dict(loads.values()))
    Checkpointer(folder, state).load(10, 0)
    with pytest.raises(DamagedCheckpointError, match=r"not what was saved: model\.bias differ"):
        Checkpointer(folder, state).load(10, 1)
