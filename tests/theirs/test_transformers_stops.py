"""A training of the Trainer that a callback has stopped, and that is started again to go on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import ClusterRun, run_cluster
from tests.support.integrations import assert_same_files, needs

SCRIPT = Path(__file__).parent / "scripts" / "transformers_trainer.py"
UPDATES = 3
"""Of an epoch, the last one of a single batch; there are three epochs."""

pytestmark = needs("transformers", "accelerate", "tensorboard")


def trainer(folder: Path, stop_after: int = -1, event: str = "", **arguments: Any) -> Any:
    """A plain Trainer in this process. A callback stops it, and saves there, in an event after an update."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Stops(TrainerCallback):  # type: ignore[misc]
        def stop(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_after:
                control.should_training_stop = control.should_save = True

    class Begins(TrainerCallback):  # type: ignore[misc]
        """Notes between which updates epochs begin."""

        seen: list[int]

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(state.global_step)

    setattr(Stops, event or "on_step_end", Stops.stop)
    Begins.seen = []
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    numbers = torch.randint(8, (10, 4), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        **arguments,
    }
    return Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(**given),
        train_dataset=[{"input_ids": row, "labels": row} for row in numbers],
        callbacks=[Stops(), Begins()],
    )


def loop_of(made: Any) -> Any:
    """The loop of a session's steps, in this process, and without a session."""
    from swift_ft.integrations.transformers.trainer import _Length, _Loop

    made.accelerator.free_memory()
    loader = made.get_train_dataloader()
    epochs, updates, *_, batches, most = made.set_initial_training_values(made.args, loader)
    made._init_training_state(most, updates, epochs, None, None)
    made._prepare_for_training(most, loader, None)
    loop = _Loop(made, _Length(epochs, updates, batches, 2), loader)
    loop.begin()
    return loop


def begins_of(made: Any) -> list[int]:
    return next(c.seen for c in made.callback_handler.callbacks if type(c).__name__ == "Begins")


def train(loop: Any, *, goes_on: bool = False) -> int:
    """Take steps until the training is over. Returns how many."""
    for count in itertools.count(1):
        loop.step(goes_on=goes_on and count == 1)
        if loop.place.over:
            return count
    raise AssertionError


STOPS = [(2, "on_step_end"), (3, "on_step_end"), (3, "on_epoch_end"), (7, "on_step_end")]


@pytest.mark.parametrize(("after", "event"), STOPS)
def test_it_goes_on_as_the_resumed_trainer_does(after: int, event: str, tmp_path: Path) -> None:
    trainer(tmp_path / "plain", after, event).train()
    plain = trainer(tmp_path / "plain")
    plain.train(resume_from_checkpoint=str(tmp_path / "plain" / f"checkpoint-{after}"))
    stopped = trainer(tmp_path / "ours", after, event)
    loop = loop_of(stopped)
    assert train(loop) == after + 1
    resumed = trainer(tmp_path / "ours")
    other = loop_of(resumed)
    for name, part in loop.to_protect().items():
        other.to_protect()[name].load_state_dict(part.state_dict())
    assert train(other, goes_on=True) == 3 * UPDATES - after + 1
    assert resumed.state.global_step == plain.state.global_step == 3 * UPDATES
    assert resumed.state.epoch == plain.state.epoch == 3
    assert begins_of(resumed) == begins_of(plain)
    for (name, ours), theirs in zip(resumed.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_of_a_training_with_a_higher_limit(tmp_path: Path) -> None:
    """The first one was not stopped: it has done all its updates, in the middle of an epoch."""
    loop = loop_of(trainer(tmp_path, max_steps=4))
    assert train(loop) == 4 + 1
    other = loop_of(longer := trainer(tmp_path, max_steps=6))
    other.to_protect()["progress"].load_state_dict(loop.to_protect()["progress"].state_dict())
    assert train(other, goes_on=True) == 2 + 1
    assert longer.state.global_step == 6


@pytest.mark.parametrize("limit", [6, 4])
def test_of_a_killed_training_with_another_limit(limit: int, tmp_path: Path) -> None:
    """It ends where the Trainer would that is resumed with these arguments."""
    loop = loop_of(trainer(tmp_path, max_steps=5))
    for _ in range(3):
        loop.step()
    other = loop_of(resumed := trainer(tmp_path, max_steps=limit))
    for name, part in loop.to_protect().items():
        other.to_protect()[name].load_state_dict(part.state_dict())
    assert train(other) == limit - 3 + 1
    assert resumed.state.global_step == resumed.state.max_steps == limit


def test_of_one_whose_last_epoch_a_callback_has_ended(tmp_path: Path) -> None:
    """Fewer updates than there might have been, and none is left."""
    made = trainer(tmp_path)
    loop = loop_of(made)
    while not loop.place.over:
        loop.step()
        made.control.should_epoch_stop = made.state.global_step % 2 == 0
    assert made.state.global_step == 2 * 3
    assert train(loop, goes_on=True) == 1
    assert made.state.global_step == 2 * 3


def run(folder: Path, *args: str, resumes: bool = False, inject: str = "") -> ClusterRun:
    command = [str(SCRIPT), "--folder", str(folder), "--checkpoint-every", "1", *args]
    flags = ["--resume"] if resumes else []
    done = run_cluster(folder, inject=inject, machines=2, flags=flags, script=command)
    assert done.code == 0, done.output[-6000:]
    return done


def test_a_stopped_run_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """As if it had not been stopped, also with a loss in its first step. Once more, and nothing is left."""
    undisturbed = run(tmp_path / "undisturbed")
    folder = tmp_path / "stopped"
    stopped = run(folder, "--stop-after", "3")
    assert torch.load(folder / "out" / "rank0.pt", weights_only=True)["state"]["global_step"] == 3
    assert "was stopped after" not in stopped.output
    resumed = run(folder, resumes=True, inject="kill machine=1 iteration=4 point=reduce")
    assert "The run before was stopped after 4 iterations. This run was started to go on" in resumed.output
    assert [recovery["mode"] for recovery in resumed.recoveries] == ["replica"]
    # Random numbers are drawn from those of an iteration, and the stopped run's last one had no update.
    assert_same_files(resumed, undisturbed, but=("rng_state",))
    again = run(folder, resumes=True)
    assert "was stopped after" not in again.output
    assert_same_files(again, undisturbed, but=("rng_state",))
