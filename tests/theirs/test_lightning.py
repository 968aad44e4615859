"""Lightning's Trainer, as it is: killed runs end as undisturbed ones, and those as under torchrun."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.errors import UnsupportedError
from tests.support.cluster import DEADLINE_S, ClusterRun, once, run_cluster
from tests.support.integrations import needs

pytestmark = needs("lightning", "tensorboard")
if importlib.util.find_spec("lightning") is not None:
    import lightning.pytorch as pl

    from swift_ft.integrations.lightning.loop import drive
    from swift_ft.integrations.lightning.protection import Protection
    from swift_ft.integrations.lightning.refusals import refuse_what_cannot_be_repeated
    from tests.theirs.scripts.lightning_parts import data

SCRIPTS = Path(__file__).parent / "scripts"
PRELOAD = ["--preload", "lightning.pytorch"]

Reference = Callable[..., Path]


def train(
    folder: Path, script: str, *args: str, inject: str = "", machines: int = 2, spares: int = 1
) -> ClusterRun:
    """Trains under swift-run, with spares."""
    command = [str(SCRIPTS / script), "--out", str(folder / "out"), "--store", str(folder / "store"), *args]
    flags = [*PRELOAD, "--spares", str(spares)]
    return run_cluster(folder, inject=inject, machines=machines, flags=flags, script=command)


def train_and_die(
    folder: Path,
    script: str,
    *args: str,
    rank: int,
    hook: str,
    global_step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> ClusterRun:
    """As :func:`train`, and one machine is killed where Lightning calls a hook."""
    monkeypatch.setenv("KILL", json.dumps({"rank": rank, "hook": hook, "global_step": global_step}))
    command = [str(SCRIPTS / "lightning_dies.py"), str(SCRIPTS / script)]
    command += ["--out", str(folder / "out"), "--store", str(folder / "store"), *args]
    run = run_cluster(folder, machines=2, flags=PRELOAD, script=command)
    assert (folder / "struck").exists()
    return run


def train_plainly(folder: Path, script: str, *args: str, workers: int = 2) -> Path:
    """Trains the same with Lightning's own strategy, under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run(
        [*launcher, str(SCRIPTS / script), "--out", str(folder), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The files of undisturbed runs."""
    reference = once(tmp_path_factory, train)
    return lambda *what, machines=2: reference(*what, machines=machines).folder / "out"


def assert_same(ours: Path, theirs: Path) -> None:
    """All files are there, and each holds the same: states, checkpoints, tables and curves."""
    found, expected = _files(ours), _files(theirs)
    assert found.keys() == expected.keys()
    assert {Path(name).suffix for name in expected} >= {".pt", ".csv"}
    for name, path in expected.items():
        if path.suffix in (".pt", ".ckpt"):
            _assert_same_values(_values(found[name], ours), _values(path, theirs), name)
        else:
            assert found[name].read_bytes() == path.read_bytes(), name
    assert _curves(ours) == _curves(theirs)


def _files(folder: Path) -> dict[str, Path]:
    """All but TensorBoard's, whose names depend on the process, and DCP's list of places."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "tfevents" not in path.name]
    paths = [path for path in paths if path.name != ".metadata"]
    return {str(path.relative_to(folder)): path for path in paths}


def _curves(folder: Path) -> list[tuple[str, int, float]]:
    """Each record of a number, once for each time that it is there."""
    loaders = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    return sorted(
        (value.tag, event.step, float(value.tensor.float_val[0]))
        for path in folder.rglob("*tfevents*")
        for event in loaders.EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tensor.float_val
    )


def _values(path: Path, folder: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=False)  # the test's own file: Lightning's have classes of its own
    return {key.replace(str(folder), ""): value for key, value in _flat(saved, str(folder))}


def _flat(value: Any, folder: str, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, folder, f"{path}.{key}")
    else:
        yield path, value.replace(folder, "") if isinstance(value, str) else value


def _assert_same_values(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    assert ours.keys() == theirs.keys(), name
    different = [key for key, value in theirs.items() if not _same(ours[key], value)]
    assert not different, f"{different[:5]} of {name} differ"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def assert_restored(run: ClusterRun, reference: Path) -> None:
    """A machine was lost, no completed iteration was, and nothing shows it."""
    assert run.code == 0, run.output[-6000:]
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica"
    assert not any(recovery["iterations_lost"].values())
    assert_same(run.folder / "out", reference)


def test_undisturbed_it_is_lightnings_own(tmp_path: Path, undisturbed: Reference) -> None:
    assert_same(undisturbed("lightning_ddp.py"), train_plainly(tmp_path, "lightning_ddp.py"))


@pytest.mark.parametrize(
    "fault",
    [
        "machine=0 iteration=5 point=reduce",
        pytest.param("machine=1 iteration=5 point=reduce", marks=pytest.mark.thorough),
        pytest.param("machine=0 iteration=7 point=optimizer", marks=pytest.mark.thorough),
        pytest.param("machine=1 iteration=4 point=optimizer", marks=pytest.mark.thorough),
        pytest.param("machine=0 iteration=3 point=between", marks=pytest.mark.thorough),
        pytest.param("machine=1 iteration=11 point=between", marks=pytest.mark.thorough),
    ],
)
def test_a_machine_is_killed(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, "lightning_ddp.py", inject=f"kill {fault}")
    assert_restored(run, undisturbed("lightning_ddp.py"))


@pytest.mark.parametrize(
    ("rank", "hook", "global_step"),
    [
        pytest.param(0, "validation_step", 6, id="first worker, in a validation within an epoch"),
        pytest.param(
            1, "validation_step", 8, id="in a validation at the end of an epoch", marks=pytest.mark.thorough
        ),
        pytest.param(
            0,
            "on_validation_end",
            6,
            id="as the best checkpoint is about to be saved",
            marks=pytest.mark.thorough,
        ),
        pytest.param(0, "on_train_epoch_end", 8, id="as an epoch ends", marks=pytest.mark.thorough),
        pytest.param(1, "on_train_epoch_start", 4, id="as an epoch begins", marks=pytest.mark.thorough),
        pytest.param(0, "training_step", 5, id="first worker, forward", marks=pytest.mark.thorough),
        pytest.param(1, "training_step", 5, id="second worker, forward", marks=pytest.mark.thorough),
    ],
)
def test_it_is_killed_in_a_hook(
    rank: int,
    hook: str,
    global_step: int,
    tmp_path: Path,
    undisturbed: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_and_die(
        tmp_path, "lightning_ddp.py", rank=rank, hook=hook, global_step=global_step, monkeypatch=monkeypatch
    )
    assert_restored(run, undisturbed("lightning_ddp.py"))


def test_each_sample_comes_once_in_an_epoch(tmp_path: Path, undisturbed: Reference) -> None:
    """Of a sampler that draws at random: each worker takes its share of one order, a replacement too."""
    script = ("lightning_ddp.py", "--kind", "seeing")
    run = train(tmp_path, *script, inject="kill machine=1 iteration=6 point=reduce")
    assert_restored(run, undisturbed(*script))
    seen = [torch.load(run.folder / "out" / f"rank{rank}.pt", weights_only=False)["seen"] for rank in (0, 1)]
    expected = sorted(data(1, 256).tensors[0][:200, 0].tolist())
    orders = []
    for epoch in range(3):
        orders.append([sample for each in seen for sample in each[epoch * 100 : (epoch + 1) * 100]])
        assert sorted(orders[-1]) == expected
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_an_average_in_the_module(
    rank: int, tmp_path: Path, undisturbed: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal of Lightning's own averages says: a loss in a validation leaves it where it was."""
    script = ("lightning_ddp.py", "--kind", "averaged")
    run = train_and_die(
        tmp_path / "killed",
        *script,
        rank=rank,
        hook="validation_step",
        global_step=6,
        monkeypatch=monkeypatch,
    )
    assert_restored(run, undisturbed(*script))
    assert_same(undisturbed(*script), train_plainly(tmp_path / "plain", *script))


FSDP = ("lightning_fsdp.py", "--replicas", "2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "workers"),
    [(("lightning_manual.py",), 2), (FSDP, 4), (("lightning_fsdp.py",), 2)],
    ids=["manual optimization", "HSDP", "FSDP2"],
)
def test_undisturbed_it_is_lightnings_own_in_other_trainings(
    script: tuple[str, ...], workers: int, tmp_path: Path, undisturbed: Reference
) -> None:
    assert_same(undisturbed(*script, machines=workers), train_plainly(tmp_path, *script, workers=workers))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault",
    [
        "machine=0 iteration=5 point=reduce",
        "machine=1 iteration=9 point=optimizer",
        "machine=0 iteration=7 point=between",
        "machine=1 iteration=11 point=between",  # the last one, which only the early stop knows
    ],
)
def test_two_optimizers_by_manual_optimization(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    """With sums, a metric and a list that are each worker's own, and a stop that comes early."""
    run = train(tmp_path, "lightning_manual.py", inject=f"kill {fault}")
    assert_restored(run, undisturbed("lightning_manual.py"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault", ["machine=0 iteration=5 point=between", "machine=3 iteration=6 point=optimizer"]
)
def test_shards_come_from_a_replica(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, *FSDP, inject=f"kill {fault}", machines=4)
    assert_restored(run, undisturbed(*FSDP, machines=4))


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param("machine=1 iteration=5 point=optimizer", "memory", id="the second worker's shards"),
        pytest.param(
            "machine=0 iteration=5 point=optimizer",
            "memory",
            id="the first one's",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_shards_come_from_memory(fault: str, mode: str, tmp_path: Path, undisturbed: Reference) -> None:
    """All go back some iterations: counters, curves and loaders with them."""
    run = train(tmp_path, "lightning_fsdp.py", inject=f"kill {fault}")
    assert run.code == 0, run.output[-6000:]
    (recovery,) = run.recoveries
    assert recovery["mode"] == mode
    assert any(recovery["iterations_lost"].values())
    assert_same(run.folder / "out", undisturbed("lightning_fsdp.py"))


@pytest.mark.thorough
def test_all_go_back_to_the_checkpoint(tmp_path: Path, undisturbed: Reference) -> None:
    """Both replicas are lost at once: the run goes on from its last global checkpoint."""
    faults = "; ".join(f"kill machine={machine} iteration=7 point=reduce" for machine in (0, 1))
    run = train(tmp_path, "lightning_ddp.py", inject=faults, spares=2)
    assert run.code == 0, run.output[-6000:]
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["resume"]) == ("start", 4)
    assert_same(run.folder / "out", undisturbed("lightning_ddp.py"))


def test_a_run_that_was_stopped_goes_on_when_it_is_resumed(tmp_path: Path, undisturbed: Reference) -> None:
    """And when it is resumed once more, it does nothing more than Lightning's own does."""
    stopped = train(tmp_path, "lightning_ddp.py", "--stop-in", "0")
    assert _loaded(tmp_path / "out")["global_step"] == 4, stopped.output[-3000:]
    expected = _loaded(undisturbed("lightning_ddp.py"))
    script = [str(SCRIPTS / "lightning_ddp.py"), "--store", str(tmp_path / "store")]
    for name in ("resumed", "once more"):
        (tmp_path / name).mkdir()
        out = ["--out", str(tmp_path / name)]
        run = run_cluster(tmp_path, machines=2, flags=[*PRELOAD, "--resume"], script=[*script, *out])
        assert run.code == 0, run.output[-6000:]
        found = _loaded(tmp_path / name)
        assert (found["global_step"], found["epoch"]) == (expected["global_step"], expected["epoch"])
        _assert_same_values(found["model"], expected["model"], name)


def _loaded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "rank0.pt", weights_only=False)  # the test's own file
    return found


def refused(**options: Any) -> str:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    with pytest.raises(UnsupportedError) as error:
        refuse_what_cannot_be_repeated(trainer)
    return str(error.value)


def test_what_cannot_be_repeated_is_refused() -> None:
    for averages in (pl.callbacks.StochasticWeightAveraging(1e-2), pl.callbacks.EMAWeightAveraging()):
        assert "keep an AveragedModel of torch in the LightningModule" in refused(callbacks=[averages])
    assert "Tuner(trainer).lr_find" in refused(callbacks=[pl.callbacks.LearningRateFinder()])
    assert "scale_batch_size" in refused(callbacks=[pl.callbacks.BatchSizeFinder()])
    assert "set_epoch()" in refused(reload_dataloaders_every_n_epochs=1)
    assert "a number of batches" in refused(val_check_interval="00:00:05:00")


def test_going_on_from_a_checkpoint_of_the_trainer_is_refused() -> None:
    """A loader that goes on within an epoch would be read from its beginning."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.ckpt_path = "last.ckpt"
    drive(trainer.fit_loop, Protection(lambda _: None, lambda _: None, {}))
    with pytest.raises(UnsupportedError, match=r"swift-run --resume"):
        trainer.fit_loop.run()
