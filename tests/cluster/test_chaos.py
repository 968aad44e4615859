"""The campaign of random faults: it sees what is identical, what is wrong, and what ended with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.faults import fail_at
from swift_ft.testing.chaos.trial import Outcome, Training, run_trial
from tests.support.cluster import EXAMPLES, SMALL

PLACES = ("--iterations", "4", "--checkpoint-every", "2", "--store", "{folder}/store")
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
