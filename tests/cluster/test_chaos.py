"""The campaign of random faults: it sees what is identical, what is wrong, and what ended with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.faults import fail_at
from swift_ft.testing.chaos.campaign import Campaign, Shape
from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.trial import Outcome, Training, run_trial
from tests.support.cluster import EXAMPLES, SMALL

PLACES = ("--iterations", "4", "--checkpoint-every", "2", "--store", "{folder}/store")
TINY = ("--layers=2", "--width=16", "--heads=2", "--sequence=16", "--microbatch-size=1", "--microbatches=2")
SEED = 35
"""Of a plan with one habit, and a fault that strikes in a step."""
LAUNCH = ("--standalone", "--machines", "2", "--heartbeat-timeout", "8", "--spares", "1")


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.thorough
def test_outcomes(tmp_path: Path) -> None:
    script = (str(EXAMPLES / "train_ddp.py"), *SMALL, *PLACES)
    training = Training(LAUNCH, script, "{folder}/store", deadline_s=120)
    undisturbed = run_trial(training, new(tmp_path / "undisturbed"))
    assert undisturbed.outcome == Outcome.IDENTICAL
    assert any("models.model" in name for name in undisturbed.state)
    kill = [fail_at(iteration=1, machine=1, point="optimizer")]
    recovered = run_trial(training, new(tmp_path / "recovered"), kill, undisturbed.state)
    assert recovered.outcome == Outcome.IDENTICAL
    assert "MachineLost" in (recovered.folder / "events.json").read_text()
    name = next(iter(undisturbed.state.keys() - {"iteration"}))
    other = run_trial(training, new(tmp_path / "other"), (), {**undisturbed.state, name: "another value"})
    assert other.outcome == Outcome.WRONG


def test_a_failure_is_told_from_a_crash(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('no data')")
    ended = run_trial(Training(LAUNCH, (str(script),), "{folder}/store", 120), new(tmp_path / "ended"))
    assert ended.outcome == Outcome.ENDED
    assert "no data" in ended.reason
    script.write_text("import time; time.sleep(1000)")
    hung = run_trial(Training(LAUNCH, (str(script),), "{folder}/store", 5), new(tmp_path / "hung"))
    assert hung.outcome == Outcome.HUNG


def test_habits_are_planted_into_both_runs(tmp_path: Path) -> None:
    script = (str(EXAMPLES / "train_ddp.py"), *TINY, *PLACES)
    training = Training(LAUNCH, script, "{folder}/store", deadline_s=120)
    plain = run_trial(training, new(tmp_path / "plain"))
    shape = Shape(machines=2, workers=1, iterations=4, most=1)
    assert random_habits(SEED) == (Habit.RATE,)
    (trial,) = Campaign(training, shape, tmp_path, SEED, plans=1, habits=True).run()
    assert (trial.outcome, trial.habits) == (Outcome.IDENTICAL, (Habit.RATE,)), trial.reason
    assert plain.state.keys() == trial.state.keys()
    assert plain.state != trial.state
