"""``swift-recover replay``: what it rebuilds from a store is what the job itself had saved, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from swift_ft.offline.part_comparison import read_part
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.store import Store
from tests.support.cluster import ClusterRun, recover, run_cluster, training
from tests.support.damage import flip

SCRIPTS = Path(__file__).parent / "scripts"
KEEPS_LOG = SCRIPTS / "keeps_log.py"
MODULE = "tests.cluster.scripts.keeps_log"

Make = Callable[..., ClusterRun]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Runs whose store has the checkpoints of iterations 3 and 6 and the log of all iterations."""
    runs: dict[str, ClusterRun] = {}

    def make(*args: str, example: str = "train_swift", module: bool = False, **options: Any) -> ClusterRun:
        name = json.dumps([args, example, module, options])
        if name not in runs:
            folder = tmp_path_factory.mktemp("run")
            script = keeps_log(folder, module=module)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EXAMPLE", example)
                patch.setenv("SESSION", json.dumps(options.pop("session", {})))
                runs[name] = run_cluster(folder, *args, script=script, **options)
            assert runs[name].code == 0, runs[name].output[-6000:]
        return runs[name]

    return make


def keeps_log(folder: Path, *, module: bool = False) -> list[str]:
    """The script and its arguments, or the module."""
    script, *arguments = training(folder, KEEPS_LOG)
    return ["-m", MODULE, *arguments] if module else [script, *arguments]


def contents(store: Path) -> dict[str, tuple[int, str]]:
    """Of every file and folder: when it was changed, and a digest."""
    return {
        str(path.relative_to(store)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in store.rglob("*")
    }


def replay(
    run: ClusterRun,
    machine: int,
    out: Path,
    *flags: str,
    args: tuple[str, ...] = (),
    example: str = "train_swift",
    session: Mapping[str, Any] | None = None,
    module: bool = False,
) -> dict[str, Any]:
    """Replays without the job; checks that the store is as it was. Returns the result, with the exit code."""
    before = contents(run.store)
    elsewhere = keeps_log(out.parent / "nowhere", module=module)  # the store that it names is not used
    where = ["--machine", str(machine), "--out", str(out), "--json"]
    env = {"EXAMPLE": example, "SESSION": json.dumps(session or {}), "SWIFT_TEST_FOLDER": str(run.folder)}
    done = recover("replay", str(run.store), *where, *flags, "--", *elsewhere, *args, **env)
    assert contents(run.store) == before
    assert not (out.parent / "nowhere").exists()
    logs = "\n".join(path.read_text()[-2000:] for path in out.glob("*.log"))
    assert done.stdout, f"{done.stderr}\n{logs}"
    result: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 1) == bool(result["differences"])
    return result


def assert_rebuilt(run: ClusterRun, machine: int, out: Path, ranks: list[int], **how: Any) -> None:
    """From the older checkpoint to the iteration of the newer one."""
    flags = ("--from-checkpoint", "3", "--to-iteration", "6")
    result = replay(
        run, machine, out, *flags, "--check-against", str(run.store / "checkpoints/00000006"), **how
    )
    assert (result["checkpoint"], result["iteration"]) == (3, 6)
    assert sorted(result["compared"]) == ranks
    assert result["differences"] == {}


@pytest.mark.parametrize("machine", range(4))
@pytest.mark.thorough
def test_every_stage(machine: int, tmp_path: Path, made: Make) -> None:
    assert_rebuilt(made(), machine, tmp_path / "out", [machine])


@pytest.mark.parametrize("machine", [0, 2])
@pytest.mark.thorough
def test_what_the_script_communicated_is_in_the_log(machine: int, tmp_path: Path, made: Make) -> None:
    assert_rebuilt(made(example="talks"), machine, tmp_path / "out", [machine], example="talks")


def test_what_followed_from_a_validation_between_steps_is_in_the_log(tmp_path: Path, made: Make) -> None:
    """The learning rate, which a plateau of the loss has halved, and the best loss so far."""
    run = made(example="between_steps", inject="kill machine=1 iteration=4 point=forward microbatch=3")
    for machine in (0, 2):  # machine 0 reads what the replacement of machine 1 has logged
        assert_rebuilt(run, machine, tmp_path / str(machine), [machine], example="between_steps")


@pytest.mark.parametrize("machine", range(4))
@pytest.mark.thorough
def test_every_worker_with_two_stages(machine: int, tmp_path: Path, made: Make) -> None:
    args = ("--schedule", "Interleaved1F1B")
    assert_rebuilt(made(*args), machine, tmp_path / "out", [machine], args=args)


@pytest.mark.parametrize(
    ("schedule", "machine"),
    [*(("ZBVZeroBubble", machine) for machine in range(4)), ("DualPipeV", 0), ("DualPipeV", 3)],
)
def test_a_worker_with_two_stages_of_a_v(schedule: str, machine: int, tmp_path: Path, made: Make) -> None:
    """The last worker's stages are neighbours, and the first one has both ends of the pipeline."""
    args = ("--schedule", schedule)
    assert_rebuilt(made(*args), machine, tmp_path / "out", [machine], args=args)


@pytest.mark.parametrize("machine", [0, 1, 3])
@pytest.mark.thorough
def test_tied_parameters(machine: int, tmp_path: Path, made: Make) -> None:
    """The first and the last stage send each other gradients, besides those of their neighbours."""
    assert_rebuilt(made(example="train_tied"), machine, tmp_path / "out", [machine], example="train_tied")


@pytest.mark.thorough
def test_a_module(tmp_path: Path, made: Make) -> None:
    """The run was started with ``-m``, and so is its replay."""
    assert_rebuilt(made(module=True), 2, tmp_path / "out", [2], module=True)


@pytest.mark.parametrize("machine", range(2))
def test_the_workers_of_a_machine_replay_together(machine: int, tmp_path: Path, made: Make) -> None:
    run = made(machines=2, flags=["--nproc-per-node", "2"])
    assert_rebuilt(run, machine, tmp_path / "out", [2 * machine, 2 * machine + 1])


@pytest.mark.thorough
def test_the_parts_of_a_stage_replay_together(tmp_path: Path, made: Make) -> None:
    """They are on one machine, and no neighbours in a pipeline."""
    args = ("--layers=2", "--microbatches=4")
    of = {"example": "train_tensor_parallel"}
    run = made(*args, machines=2, flags=["--nproc-per-node", "2"], **of)
    assert_rebuilt(run, 1, tmp_path / "out", [2, 3], args=args, **of)


@pytest.mark.parametrize("machine", [0, 1, 2])
@pytest.mark.thorough
def test_the_machines_of_a_group_replay_together(machine: int, tmp_path: Path, made: Make) -> None:
    session = {"groups": [[0], [1, 2], [3]]}
    ranks = [0] if machine == 0 else [1, 2]
    assert_rebuilt(made(session=session), machine, tmp_path / "out", ranks, session=session)


@pytest.mark.thorough
def test_replicas_replay_together(tmp_path: Path, made: Make) -> None:
    """Ranks 0 and 2 hold the first stage, each in a pipeline of its own, and average their gradients."""
    args = ("--layers=4", "--microbatches=4")
    run = made(*args, example="train_hybrid")
    assert_rebuilt(run, 2, tmp_path / "out", [0, 2], args=args, example="train_hybrid")


@pytest.mark.parametrize("machine", [1, 2])
@pytest.mark.thorough
def test_what_a_live_recovery_produced(machine: int, tmp_path: Path, made: Make) -> None:
    """Machine 1 was replayed live; its part of the later checkpoint comes from that, and its log, too."""
    run = made(inject="kill machine=1 iteration=4 point=forward microbatch=3")
    assert len(run.recoveries) == 1
    assert_rebuilt(run, machine, tmp_path / "out", [machine])


@pytest.mark.thorough
def test_to_the_end_of_the_log(tmp_path: Path) -> None:
    """By default from the newest checkpoint as far as the log goes: here to the end of the run."""
    run = run_cluster(tmp_path / "run", inject="kill machine=2 iteration=7 point=backward microbatch=3")
    out = tmp_path / "out"
    where = ["--machine", "2", "--out", str(out)]
    done = recover("replay", str(run.store), *where, "--", *training(tmp_path / "nowhere"))
    assert "8 iterations completed, replayed from the checkpoint of iteration 6" in done.stdout, done.stderr
    with_dcp_alone = read_with_dcp(out / "rank-00002")
    weights = torch.load(run.folder / "weights" / "rank2.pt", weights_only=True)
    assert weights
    assert all(torch.equal(with_dcp_alone[f"models.model.{name}"], weights[name]) for name in weights)


def read_with_dcp(folder: Path) -> dict[str, torch.Tensor]:
    metadata: Metadata = FileSystemReader(folder).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_another_state_is_found(tmp_path: Path, made: Make) -> None:
    """Of the same iteration: another worker's."""
    out, (other,) = tmp_path / "out", (made().store / "checkpoints" / "00000006").glob("rank-00002*")
    result = replay(made(), 1, out, "--to-iteration", "6", "--check-against", str(other))
    assert "optimizers.optimizer.state.0.exp_avg" in result["differences"]["1"]


def test_other_arguments_are_refused(tmp_path: Path, made: Make) -> None:
    """Stage 1 would get all its messages, and sum up the gradients of fewer."""
    out = tmp_path / "out"
    where = ["--machine", "1", "--to-iteration", "7", "--out", str(out)]
    script = [*training(tmp_path / "nowhere", KEEPS_LOG), "--microbatches=4"]
    env = {"EXAMPLE": "train_swift", "SESSION": "{}", "SWIFT_TEST_FOLDER": str(made().folder)}
    done = recover("replay", str(made().store), *where, "--", *script, **env)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "microbatches are 4 here and were 8 in the run" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"OMP_NUM_THREADS": "2"}, "the variable OMP_NUM_THREADS is 2 here and was 1 in the run"),
        ({"MKL_CBWR": "COMPATIBLE"}, "the variable MKL_CBWR is COMPATIBLE here and was not set in the run"),
        (
            {"EXAMPLE": "train_plain"},
            "the variable EXAMPLE is train_plain here and was train_swift in the run",
        ),
    ],
)
def test_another_environment_is_refused(
    changed: dict[str, str], words: str, tmp_path: Path, made: Make
) -> None:
    out = tmp_path / "out"
    where = ["--machine", "1", "--to-iteration", "7", "--out", str(out)]
    script = training(tmp_path / "nowhere", KEEPS_LOG)
    env = {"EXAMPLE": "train_swift", "SESSION": "{}", "SWIFT_TEST_FOLDER": str(made().folder), **changed}
    done = recover("replay", str(made().store), *where, "--", *script, **env)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert words in line
    assert not out.exists()


def test_a_damaged_message(tmp_path: Path, made: Make) -> None:
    """The segment itself is whole, so it is found when the message is read; the output stays."""
    run, out = made(), tmp_path / "out"
    shutil.copytree(run.store, tmp_path / "store")
    (segment,) = (tmp_path / "store/log/rank-00000").glob("*-i00000003-00000005.arrow")
    flip(segment)
    where = ["--machine", "1", "--from-checkpoint", "3", "--out", str(out)]
    script = training(tmp_path / "nowhere", KEEPS_LOG)
    env = {"EXAMPLE": "train_swift", "SESSION": "{}", "SWIFT_TEST_FOLDER": str(run.folder)}
    done = recover("replay", str(tmp_path / "store"), *where, "--", *script, **env)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert "worker 1 cannot replay: the payload of iteration" in line
    assert [path.name for path in out.iterdir()] == ["rank-00001.log"]


@pytest.mark.parametrize("machine", [1, 2])
@pytest.mark.thorough
def test_any_iteration(machine: int, tmp_path: Path, made: Make) -> None:
    """What worker 1 had at each iteration comes from its live replay; worker 2 survived."""
    run = made(inject="kill machine=1 iteration=4 point=forward microbatch=3")
    for iteration in (4, 5, 7):
        out = tmp_path / str(iteration)
        replay(run, machine, out, "--from-checkpoint", "3", "--to-iteration", str(iteration))
        rebuilt = read_part(Store(out), SavedPart(f"rank-{machine:05d}", ""))
        live = torch.load(run.folder / f"{iteration}-rank{machine}.pt", weights_only=True)
        assert live
        assert all(torch.equal(rebuilt[f"models.model.{name}"], live[name]) for name in live), iteration


@pytest.mark.thorough
def test_from_any_checkpoint(tmp_path: Path, made: Make) -> None:
    """A replay to an iteration, and one from a later checkpoint, end in the same state."""
    for name, checkpoint in (("first", 3), ("second", 6)):
        flags = ["--from-checkpoint", str(checkpoint), "--to-iteration", "7"]
        against = ["--check-against", str(tmp_path / "first")] if name == "second" else []
        result = replay(made(), 3, tmp_path / name, *flags, *against)
    assert (result["compared"], result["differences"]) == ([3], {})
