"""The Trainer of Hugging Face: each run loses a worker, and ends like an undisturbed one to the bit.

That is all weights, the optimizer, the scheduler, ``log_history``, the Trainer's other state, and the files
that it has saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from swift_ft.errors import UsageError
from tests.support.cluster import ClusterRun, once, run_cluster
from tests.support.integrations import assert_same_files, needs, train
from tests.support.plain_run import Job, run_plain

SCRIPT = Path(__file__).parent / "scripts" / "transformers_trainer.py"
LORA = Path(__file__).parent / "scripts" / "trl_sft.py"
thorough = pytest.mark.thorough

Reference = Callable[..., ClusterRun]

pytestmark = needs("transformers", "accelerate", "tensorboard")


def run(folder: Path, script: Path, *args: str, inject: str = "") -> ClusterRun:
    command = [str(script), "--folder", str(folder), "--checkpoint-every", "4", *args]
    done = run_cluster(folder, inject=inject, machines=2, script=command)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs of scripts."""
    return once(tmp_path_factory, run)


def assert_same_end(disturbed: ClusterRun, reference: ClusterRun) -> None:
    """One worker was lost and came back by its replica, and the run ended like the other one."""
    (recovery,) = disturbed.recoveries
    assert recovery["mode"] == "replica"
    assert not any(recovery["iterations_lost"].values())
    assert_same_files(disturbed, reference)


EVENTS = [
    # worker, updates that are done, and what the Trainer does then
    pytest.param("epochs", "1:9:on_step_begin", marks=thorough, id="forward, worker 1"),
    pytest.param("epochs", "0:9:on_substep_end", marks=thorough, id="between two backward passes, worker 0"),
    pytest.param("steps", "1:4:on_prediction_step", marks=thorough, id="evaluation, worker 1"),
    pytest.param("steps", "0:4:on_prediction_step", id="evaluation, worker 0"),
    pytest.param("steps", "1:9:on_prediction_step", marks=thorough, id="evaluation after the last update"),
    pytest.param("epochs", "1:12:on_prediction_step", marks=thorough, id="evaluation that ends training"),
    pytest.param("epochs", "0:0:on_prediction_step", marks=thorough, id="evaluation before the first step"),
    pytest.param("steps", "0:5:on_optimizer_step", marks=thorough, id="update, worker 0"),
    pytest.param("epochs", "1:5:on_optimizer_step", marks=thorough, id="last update of an epoch, worker 1"),
    pytest.param("epochs", "0:6:on_save", marks=thorough, id="a checkpoint is saved, worker 0"),
    pytest.param("steps", "1:6:on_log", marks=thorough, id="a line is logged, worker 1"),
    pytest.param("epochs", "0:6:on_epoch_end", marks=thorough, id="end of an epoch, worker 0"),
]


@pytest.mark.parametrize(("by", "event"), EVENTS)
def test_a_loss(by: str, event: str, tmp_path: Path, undisturbed: Reference) -> None:
    """Accumulation, a schedule, clipping, evaluation, checkpoints, the best model, early stopping."""
    disturbed = run(tmp_path, SCRIPT, "--by", by, "--die", event)
    assert (tmp_path / "died").exists()
    assert_same_end(disturbed, undisturbed(SCRIPT, "--by", by))


@pytest.mark.parametrize(
    ("by", "fault"),
    [
        ("steps", "machine=0 iteration=5 point=reduce"),
        pytest.param("epochs", "machine=1 iteration=7 point=reduce", marks=thorough),
        pytest.param("steps", "machine=1 iteration=6 point=optimizer", marks=thorough),
        pytest.param("epochs", "machine=0 iteration=6 point=optimizer", marks=thorough),
    ],
)
def test_a_lost_machine(by: str, fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    disturbed = run(tmp_path, SCRIPT, "--by", by, inject=f"kill {fault}")
    assert_same_end(disturbed, undisturbed(SCRIPT, "--by", by))


@pytest.mark.thorough
def test_processes_that_load_batches(tmp_path: Path, undisturbed: Reference) -> None:
    """They are those of no loader processes, too."""
    disturbed = run(tmp_path, SCRIPT, "--by", "epochs", "--workers", "1", "--die", "1:8:on_step_begin")
    assert_same_end(disturbed, undisturbed(SCRIPT, "--by", "epochs"))


@pytest.mark.thorough
def test_all_go_back(tmp_path: Path, undisturbed: Reference) -> None:
    """Both workers are lost: the Trainer's loop goes back with their replacements to the last checkpoint."""
    disturbed = run(tmp_path, SCRIPT, "--by", "epochs", "--die", "all:9:on_step_begin")
    assert (tmp_path / "died").exists()
    assert disturbed.recoveries[-1]["mode"] == "start"
    assert_same_files(disturbed, undisturbed(SCRIPT, "--by", "epochs"))


@pytest.mark.parametrize("by", ["steps", pytest.param("epochs", marks=thorough)])
def test_the_plain_trainer(by: str, tmp_path: Path, undisturbed: Reference) -> None:
    """Under torchrun it has the same weights, curves and checkpoints, but for random states in these."""
    command = [str(SCRIPT), "--folder", str(tmp_path), "--plain", "--by", by]
    (plain,) = run_plain(tmp_path, [Job(str(tmp_path), command)], workers=2)
    assert_same_files(plain, undisturbed(SCRIPT, "--by", by), but=("rng_state", "is_local_process_zero"))


@needs("trl", "peft", "datasets")
@pytest.mark.parametrize(
    "event",
    [pytest.param(event, marks=thorough) for event in ("1:4:on_prediction_step", "0:3:on_substep_end")],
)
def test_lora_with_trl(event: str, tmp_path: Path, undisturbed: Reference) -> None:
    """TRL's SFTTrainer on an adapter of PEFT: its metrics are a part of the curves."""
    disturbed = run(tmp_path, LORA, "--die", event)
    assert (tmp_path / "died").exists()
    assert_same_end(disturbed, undisturbed(LORA))


@needs("trl", "peft", "datasets")
@pytest.mark.thorough
def test_the_plain_sft_trainer(tmp_path: Path, undisturbed: Reference) -> None:
    command = [str(LORA), "--folder", str(tmp_path), "--plain"]
    (plain,) = run_plain(tmp_path, [Job(str(tmp_path), command)], workers=2)
    assert_same_files(plain, undisturbed(LORA), but=("rng_state", "is_local_process_zero"))


@pytest.mark.thorough
def test_the_example(tmp_path: Path) -> None:
    """The curves are in the files, too, but for the times, in which no two runs are alike."""

    def example(folder: Path, inject: str = "") -> ClusterRun:
        out = ["--out", str(folder / "out")]
        return train(folder, "integrations/hf_trainer.py", *out, inject=inject, machines=2)

    disturbed = example(tmp_path / "disturbed", "kill machine=1 iteration=5 point=optimizer")
    assert_same_end(disturbed, example(tmp_path / "undisturbed"))
    saved = torch.load(tmp_path / "disturbed" / "out" / "rank0.pt", weights_only=True)
    assert [entry["step"] for entry in saved["curves"] if "eval_loss" in entry] == [3, 6, 8]
    assert [entry["step"] for entry in saved["curves"] if "loss" in entry] == list(range(1, 9))


def swift_trainer(folder: Path, data: Any, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from swift_ft.integrations.transformers import SwiftTrainer

    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    given = TrainingArguments(
        **{"max_steps": 2, **arguments}, output_dir=str(folder), use_cpu=True, report_to="none"
    )
    return SwiftTrainer(model, given, train_dataset=data, store=str(folder / "store"))


SAMPLES = [{"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}] * 8


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


@pytest.mark.parametrize(
    ("arguments", "data", "said"),
    [
        ({"auto_find_batch_size": True}, SAMPLES, "set per_device_train_batch_size"),
        ({"optim": "adalomo"}, SAMPLES, "choose an optimizer that has a step"),
        ({"enable_jit_checkpoint": True}, SAMPLES, "leave it out"),
        ({"accelerator_config": {"dispatch_batches": True}}, Stream(), "'dispatch_batches': False"),
        ({}, SAMPLES, "start the script with `swift-run`"),
    ],
)
def test_refused(arguments: dict[str, Any], data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        swift_trainer(tmp_path, data, **arguments).train()


@pytest.mark.parametrize(
    ("attribute", "said"),
    [("is_fsdp_enabled", "session.attach_fsdp()"), ("is_deepspeed_enabled", "restarts as torchrun does")],
)
def test_engines_are_refused(attribute: str, said: str, tmp_path: Path) -> None:
    trainer = swift_trainer(tmp_path, SAMPLES)
    setattr(trainer, attribute, True)  # as the Trainer finds it, on devices that have them
    with pytest.raises(UsageError, match=re.escape(said)):
        trainer.train()


def test_going_on_from_a_checkpoint_of_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="swift-run --resume"):
        swift_trainer(tmp_path, SAMPLES).train(resume_from_checkpoint=True)
