"""The runs of a campaign: which are run again, and which count as they are."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import SwiftError
from swift_ft.faults import Fault, parse_faults
from swift_ft.testing.chaos import campaign
from swift_ft.testing.chaos.campaign import Campaign
from swift_ft.testing.chaos.plans import Shape
from swift_ft.testing.chaos.run_folder import new_own, report_of
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

AT_A_TIME = 2


def test_runs_side_by_side_learn_of_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that differs between undisturbed runs is no finding, however many meet it at a time.

    All compare with what is known before any of them has ended.
    """
    clock, together = itertools.count(), threading.Barrier(AT_A_TIME, timeout=20)
    first = itertools.count()

    def run_trial(
        training: Training,
        folder: Path,
        plan: Sequence[Fault] = (),
        expected: Any = None,
        *,
        learns: bool = False,
    ) -> Trial:
        state = {"iteration": "4", "file times.txt": str(next(clock))}
        if not plan:
            return Trial("", Outcome.IDENTICAL, 0, "", state, folder)
        if next(first) < AT_A_TIME:
            together.wait()
        outcome = Outcome.IDENTICAL if "file times.txt" in training.unstable else Outcome.WRONG
        return Trial("; ".join(map(str, plan)), outcome, 0, "", state, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    plan = parse_faults("kill machine=0 iteration=1")
    shape, training = Shape(2, 1, 4), Training((), (), "", 10)
    made = Campaign(training, shape, tmp_path, 0, AT_A_TIME, AT_A_TIME, learns=True, given=plan)
    assert [trial.outcome for trial in made.run()] == [Outcome.IDENTICAL] * AT_A_TIME


@pytest.mark.parametrize(("reason", "tries"), [("", 3), ("it ended before any fault: no data", 1)])
def test_a_run_that_ends_before_any_fault_is_not_hidden_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, tries: int
) -> None:
    """Only one that went well is repeated with other faults."""
    runs = []

    def run_trial(training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any) -> Trial:
        runs.append(plan)
        outcome = Outcome.NOT_STRUCK if plan else Outcome.IDENTICAL
        return Trial("", outcome, 0, reason if plan else "", {"iteration": "4"}, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    made = Campaign(Training((), (), "", 10), Shape(2, 1, 4), tmp_path, 0, plans=1, learns=True)
    (trial,) = made.run()
    assert (trial.outcome, trial.reason) == (Outcome.NOT_STRUCK, reason)
    assert len(set(runs)) == 1 + tries
    assert trial.folder.exists() == bool(reason)


def test_a_run_that_differs_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong in it is a race's, maybe: only the first run has it. Its folder is there afterwards."""
    clock, disturbed = itertools.count(), []

    def run_trial(training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any) -> Trial:
        state = {"iteration": "4", "file times.txt": str(next(clock)), "worker 0.weight": "right"}
        if not plan:
            return Trial("", Outcome.IDENTICAL, 0, "", state, folder)
        disturbed.append(folder)
        state["worker 0.weight"] = "right" if len(disturbed) > 1 else "wrong"
        return Trial("; ".join(map(str, plan)), Outcome.WRONG, 0, "", state, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    plan = parse_faults("kill machine=0 iteration=1")
    made = Campaign(Training((), (), "", 10), Shape(2, 1, 4), tmp_path, 0, 1, learns=True, given=plan)
    (trial,) = made.run()
    assert (trial.outcome, len(disturbed)) == (Outcome.WRONG, 1)
    assert trial.reason == "1 of 2 values and files differ: worker 0.weight"
    assert trial.folder.is_dir()


@pytest.mark.parametrize("usage", [True, False])
def test_a_habit_is_refused_with_a_line_for_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: bool
) -> None:
    """An error of the program is none, with or without a checkpoint before it."""

    def run_trial(training: Training, folder: Path, *_: Any, **__: Any) -> Trial:
        new_own(folder)
        failed = {"event": "ScriptFailed", "reason": "it failed", "cause": "", "usage": usage}
        report_of(folder).write_text(json.dumps({"events": [failed]}))
        return Trial("", Outcome.UNLOADABLE, 1, "it failed", {}, folder, training.habits)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    made = Campaign(Training((), (), "", 10), Shape(2, 1, 4), tmp_path, 0, plans=1, habits=True, learns=True)
    if usage:
        assert [trial.outcome for trial in made.run()] == [Outcome.ENDED]
    else:
        with pytest.raises(SwiftError, match="ended as NO CHECKPOINT \\(it failed\\)"):
            [*made.run()]
