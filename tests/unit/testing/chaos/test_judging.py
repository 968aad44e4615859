"""A run that ended well is as the undisturbed one, within a documented bound, or wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.state_payload import unpack
from swift_ft.checkpoint.state_values import digests_of
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.faults import parse_faults
from swift_ft.testing.chaos import judging
from swift_ft.testing.chaos.comparison import files_of, last_state
from swift_ft.testing.chaos.judging import End, judged, judged_again
from swift_ft.testing.chaos.run_folder import new_own, output_of, report_of
from swift_ft.testing.chaos.trial import Outcome, Training, Trial
from swift_ft.testing.chaos.unstable import Unstable
from tests.unit.testing.chaos.saved import save, state_of

TRAINING = Training((), (), "{folder}/store", 10)
KILL = "kill machine=1 iteration=3 point=between"
UNDONE = {"resume": 3, "undone": {"0": 2}, "undone_exactly": [], "statistics_from": {}}
EXACTLY = {**UNDONE, "undone_exactly": [0]}
REPLACED = {"resume": 3, "undone": {}, "undone_exactly": [], "statistics_from": {"0": 1}}
PLAINLY = {"resume": 3, "undone": {}, "undone_exactly": [], "statistics_from": {}}
AFTER_ALL = {**PLAINLY, "resume": 4}


def ran(folder: Path, *, bias: float = 1.0, files: dict[str, str] | None = None) -> Trial:
    """A run that is over, with its store and its files."""
    state = state_of()
    with torch.no_grad():
        state["model"].bias.add_(bias)
    url = save(folder / "store", state)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return Trial("", Outcome.IDENTICAL, 0, "", {**last_state(url), **files_of(folder)}, folder)


def judge(trial: Trial, expected: Trial, *recoveries: dict[str, Any]) -> tuple[Outcome, str]:
    end = End(0, "", 1.0, report={"recoveries": recoveries})
    outcome, reason, state = judged(TRAINING, trial.folder, parse_faults(KILL), end, expected)
    assert state == trial.state
    return outcome, reason


def test_an_inexact_undo_excuses_small_differences_of_values(tmp_path: Path) -> None:
    expected, trial = ran(tmp_path / "expected"), ran(tmp_path / "run", bias=1 + 1e-7)
    assert judge(trial, expected, UNDONE)[0] == Outcome.BOUNDED
    assert judge(trial, expected, PLAINLY)[0] == Outcome.WRONG
    assert judge(trial, expected, EXACTLY)[0] == Outcome.WRONG
    assert judge(trial, expected, EXACTLY, UNDONE)[0] == Outcome.BOUNDED
    assert judge(ran(tmp_path / "large", bias=1.1), expected, UNDONE)[0] == Outcome.WRONG
    assert judge(ran(tmp_path / "nan", bias=float("nan")), expected, UNDONE)[0] == Outcome.WRONG


@pytest.mark.parametrize("bias", [1.0, 1 + 1e-7], ids=["files alone", "values as well"])
@pytest.mark.parametrize("recovery", [UNDONE, REPLACED], ids=["undone", "replaced"])
def test_nothing_excuses_a_file_that_differs(tmp_path: Path, recovery: dict[str, Any], bias: float) -> None:
    """Also not one whose name is that of a statistic."""
    for name in ("out.txt", "running_mean"):
        expected = ran(tmp_path / f"expected-{name}", files={name: "1"})
        trial = ran(tmp_path / f"run-{name}", bias=bias, files={name: "2"})
        outcome, reason = judge(trial, expected, recovery)
        assert outcome == Outcome.WRONG
        assert f"file {name}" in reason


FLIP = "flip worker=0 iteration=3 point=between"


def damaged(
    folder: Path, *, weight: float = 1.0, text: str = "1", struck: str = "checkpoints/00000004/a"
) -> tuple[Trial, End]:
    """A run that a fault has left without its last checkpoint, and its end."""
    save(folder / "store", state_of(weight), iteration=2)
    save(folder / "store", state_of())
    (file,) = (folder / "store" / "checkpoints" / "00000004").rglob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (folder / "out.txt").write_text(text)
    new_own(folder)
    output_of(folder).write_text(f"[machine 0] swift_ft: '{FLIP}' has struck {struck}\n")
    trial = Trial(FLIP, Outcome.WRONG, 0, "", files_of(folder), folder)
    return trial, End(0, output_of(folder).read_text(), 1.0, report={"recoveries": [PLAINLY]})


@pytest.mark.parametrize(
    ("plan", "struck", "outcome"),
    [
        (FLIP, "checkpoints/00000004/committed.json", Outcome.DAMAGED),
        (FLIP, "checkpoints/00000002/committed.json", Outcome.WRONG),
        (FLIP, "log/rank-00000/g00001-s000001", Outcome.WRONG),
        (KILL, "checkpoints/00000004/committed.json", Outcome.WRONG),
    ],
)
def test_a_damaged_checkpoint_is_excused_where_a_fault_has_damaged_it(
    tmp_path: Path, plan: str, struck: str, outcome: Outcome
) -> None:
    """And an earlier one loads."""
    _, end = damaged(tmp_path, struck=struck)
    found, reason, _ = judged(TRAINING, tmp_path, parse_faults(plan), end, None)
    assert (found, "its last checkpoint is damaged" in reason) == (outcome, True)


@pytest.mark.parametrize(
    ("facts", "kept", "outcome", "differs"),
    [
        ({}, True, Outcome.DAMAGED, ""),
        ({"weight": 2.0}, True, Outcome.WRONG, "worker 0.models.model.weight"),
        ({"weight": 2.0}, False, Outcome.DAMAGED, ""),
        ({"text": "2"}, True, Outcome.WRONG, "file out.txt"),
        ({"text": "2"}, False, Outcome.WRONG, "file out.txt"),
    ],
)
def test_all_but_a_damaged_checkpoint_is_compared(
    tmp_path: Path, facts: dict[str, Any], kept: bool, outcome: Outcome, differs: str
) -> None:
    """The script's files, and the newest intact checkpoint if the undisturbed run still has that one."""
    if kept:
        save(tmp_path / "expected" / "store", state_of(), iteration=2)
    save(tmp_path / "expected" / "store", state_of())
    (tmp_path / "expected" / "out.txt").write_text("1")
    state = {**last_state(str(tmp_path / "expected" / "store")), **files_of(tmp_path / "expected")}
    expected = Trial("", Outcome.IDENTICAL, 0, "", state, tmp_path / "expected")
    # A variable in which undisturbed runs differ is in their last checkpoints.
    training = replace(TRAINING, unstable=Unstable(unlike=frozenset({"worker 0.plain.bytes.carried..t0"})))
    trial, end = damaged(tmp_path / "run", **facts)
    found, reason, left = judged(training, tmp_path / "run", parse_faults(FLIP), end, expected)
    assert (found, left) == (outcome, trial.state), reason
    assert differs in reason
    report_of(trial.folder).write_text(json.dumps(end.report))
    assert judged_again(trial, training, expected).outcome == outcome
    unlike = replace(training, unstable=Unstable(unlike=frozenset({"file out.txt"})))
    judged_so = Outcome.DAMAGED if "file" in differs else outcome
    assert judged_again(trial, unlike, expected).outcome == judged_so


def test_a_run_that_has_come_less_far_is_wrong_whatever_is_damaged(tmp_path: Path) -> None:
    _, end = damaged(tmp_path)
    expected = Trial("", Outcome.IDENTICAL, 0, "", {"iteration": "6", **files_of(tmp_path)}, tmp_path)
    assert judged(TRAINING, tmp_path, parse_faults(FLIP), end, expected)[0] == Outcome.WRONG


def test_a_run_is_judged_again_by_what_it_left(tmp_path: Path) -> None:
    """Of two files that differ one is known to be unstable now: the other one is the finding."""
    expected = ran(tmp_path / "expected", files={"time.txt": "1", "out.txt": "1"})
    trial = ran(tmp_path / "run", files={"time.txt": "2", "out.txt": "2"})
    unstable = Training((), (), "{folder}/store", 10, unstable=Unstable(unlike=frozenset({"file time.txt"})))
    again = judged_again(trial, unstable, expected)
    assert again.outcome == Outcome.WRONG
    assert again.reason == f"1 of {len(trial.state) - 1} values and files differ: file out.txt"
    alike = ran(tmp_path / "alike", files={"time.txt": "2", "out.txt": "1"})
    assert judged_again(alike, unstable, expected).outcome == Outcome.IDENTICAL


def test_a_run_that_is_judged_again_may_be_within_a_bound(tmp_path: Path) -> None:
    """Its report is where it was."""
    expected = ran(tmp_path / "expected", files={"time.txt": "1"})
    trial = ran(tmp_path / "run", bias=1 + 1e-7, files={"time.txt": "2"})
    new_own(trial.folder)
    report_of(trial.folder).write_text(json.dumps({"recoveries": [UNDONE]}))
    unstable = Training((), (), "{folder}/store", 10, unstable=Unstable(unlike=frozenset({"file time.txt"})))
    assert judged_again(trial, unstable, expected).outcome == Outcome.BOUNDED


def test_a_run_that_is_judged_again_was_struck_as_before(tmp_path: Path) -> None:
    expected = ran(tmp_path / "expected")
    missed = Trial(KILL, Outcome.WRONG, 0, "", expected.state, tmp_path, missed=(KILL,))
    assert judged_again(missed, TRAINING, expected).outcome == Outcome.NOT_STRUCK


def with_statistics(folder: Path, mean: float, **more: float) -> Trial:
    """A run whose model has running statistics."""
    state = state_of()
    model: nn.Module = state["model"]
    model.register_buffer("running_mean", torch.full((2,), mean))
    for name, value in more.items():
        model.get_parameter(name).data.fill_(value)
    url = save(folder / "store", state)
    return Trial("", Outcome.IDENTICAL, 0, "", last_state(url), folder)


def test_statistics_of_a_lost_replica_are_numbers_of_another_one(tmp_path: Path) -> None:
    expected = with_statistics(tmp_path / "expected", 1.0)
    other, broken = with_statistics(tmp_path / "other", 3.0), with_statistics(tmp_path / "nan", math.nan)
    assert judge(other, expected, REPLACED)[0] == Outcome.BOUNDED
    assert judge(other, expected, PLAINLY)[0] == Outcome.WRONG
    assert judge(broken, expected, REPLACED)[0] == Outcome.WRONG
    assert judge(other, expected, {**REPLACED, "statistics_from": {"1": 0}})[0] == Outcome.WRONG


@pytest.mark.parametrize(("saver", "outcome"), [(1, Outcome.BOUNDED), (0, Outcome.WRONG)])
def test_statistics_are_those_of_the_worker_that_has_saved_them(
    tmp_path: Path, saver: int, outcome: Outcome
) -> None:
    """Under the name of the first one that has this part."""

    def saved(name: str, mean: float) -> Trial:
        state = state_of()
        state["model"].register_buffer("running_mean", torch.full((2,), mean))
        url = save(tmp_path / name / "store", state, state, parts={0: saver, 1: saver})
        return Trial("", Outcome.IDENTICAL, 0, "", last_state(url), tmp_path / name)

    expected, other = saved("expected", 1.0), saved("other", 3.0)
    assert {name.split(".")[0] for name in other.state} == {"iteration", "worker 0"}
    assert judge(other, expected, {**REPLACED, "statistics_from": {"1": 0}})[0] == outcome


def test_a_count_of_batches_is_the_same_in_all_replicas(tmp_path: Path) -> None:
    def saved(name: str, count: int) -> Trial:
        state = state_of()
        state["model"].register_buffer("num_batches_tracked", torch.tensor(count))
        url = save(tmp_path / name / "store", state)
        return Trial("", Outcome.IDENTICAL, 0, "", last_state(url), tmp_path / name)

    assert judge(saved("run", 3), saved("expected", 4), REPLACED)[0] == Outcome.WRONG


def test_statistics_and_an_undo_have_a_bound_each(tmp_path: Path) -> None:
    expected = with_statistics(tmp_path / "expected", 1.0, bias=1.0)
    near, far = (
        with_statistics(tmp_path / name, 3.0, bias=bias) for name, bias in (("near", 1 + 1e-7), ("far", 1.1))
    )
    assert judge(near, expected, REPLACED, UNDONE)[0] == Outcome.BOUNDED
    assert judge(near, expected, REPLACED)[0] == Outcome.WRONG
    assert judge(far, expected, REPLACED, UNDONE)[0] == Outcome.WRONG


def judge_state(
    folder: Path,
    state: dict[str, str],
    expected: dict[str, str],
    *recoveries: dict[str, Any],
    ends: Sequence[tuple[int, int]] = (),
) -> Outcome:
    """The outcome of a run of which the names and digests of its values are known.

    Args:
        folder: the run's.
        state: of it.
        expected: of the undisturbed run.
        recoveries: of its report.
        ends: ranks, and the generations that their last processes were started in.
    """
    new_own(folder)
    events = [{"event": "ScriptExited", "rank": rank, "started_in": begun} for rank, begun in ends]
    report_of(folder).write_text(json.dumps({"recoveries": recoveries, "events": events}))
    undisturbed = Trial("", Outcome.IDENTICAL, 0, "", {"iteration": "4", **expected}, folder)
    return judged_again(
        replace(undisturbed, state={"iteration": "4", **state}), TRAINING, undisturbed
    ).outcome


def carried(function: str, **variables: Any) -> dict[str, str]:
    """Variables of the script's, as they are named in a checkpoint."""
    return digests_of({"carried": {function: variables}}, "worker 0.plain.bytes")


@pytest.mark.parametrize("function", ["", "(loop)", "(passes on)"])
@pytest.mark.parametrize("history", [[2, 3], [0, 1, 2, 3, 3], [0, 1], []], ids=str)
def test_a_variable_that_has_lost_some_of_it_is_wrong(
    tmp_path: Path, function: str, history: list[int]
) -> None:
    """Whenever the worker came that has saved it."""
    expected, found = carried(function, history=[0, 1, 2, 3]), carried(function, history=history)
    assert judge_state(tmp_path, found, expected, AFTER_ALL) == Outcome.WRONG


UNSAVED = {"swift_ft.unsaved": "an open file"}


@pytest.mark.parametrize(
    ("function", "value", "recovery", "outcome"),
    [
        ("", UNSAVED, AFTER_ALL, Outcome.IDENTICAL),
        ("(loop)", UNSAVED, AFTER_ALL, Outcome.IDENTICAL),
        ("(passes on)", UNSAVED, AFTER_ALL, Outcome.IDENTICAL),
        ("", UNSAVED, PLAINLY, Outcome.WRONG),
        ("(loop)", UNSAVED, PLAINLY, Outcome.WRONG),
        ("(epochs)", UNSAVED, AFTER_ALL, Outcome.WRONG),
        ("", [1, 2], AFTER_ALL, Outcome.WRONG),
        ("(loop)", [1, 2], AFTER_ALL, Outcome.WRONG),
        ("(passes on)", 1.0, AFTER_ALL, Outcome.WRONG),
    ],
)
def test_a_variable_that_a_step_makes_and_nobody_can_save_is_not_there_without_one(
    tmp_path: Path, function: str, value: object, recovery: dict[str, Any], outcome: Outcome
) -> None:
    """Of a worker that took over when the last step was complete: it is given all that can be saved.

    An undisturbed run has them all.
    """
    kept = carried(function, history=[0, 1])
    whole = {**kept, **carried(function, batch=value)}
    assert judge_state(tmp_path, kept, whole, recovery) == outcome
    assert judge_state(tmp_path, whole, kept, recovery) == Outcome.WRONG


def unsaved(words: str = "", *, of_epoch: bool = False) -> dict[str, Any]:
    value = {"swift_ft.unsaved": words}
    return {"swift_ft.of_epoch": value} if of_epoch else value


@pytest.mark.parametrize(
    ("found", "started_in", "outcome"),
    [
        ({}, 2, Outcome.IDENTICAL),
        ({"file": unsaved()}, 2, Outcome.IDENTICAL),  # before the next epoch, which it was not in
        ({}, 1, Outcome.WRONG),
        ({"file": 1}, 2, Outcome.WRONG),
        ({"file": unsaved("a list of 100,000 elements")}, 2, Outcome.WRONG),
    ],
)
@pytest.mark.parametrize("function", ["", "(loop)"])
def test_a_file_that_a_process_has_never_opened(
    tmp_path: Path, function: str, found: dict[str, Any], started_in: int, outcome: Outcome
) -> None:
    kept, expected = carried(function, loss=1.0), carried(function, file=unsaved(of_epoch=True))
    ours = {**kept, **carried(function, **found)} if found else kept
    ends = [(0, started_in), (1, 2)]
    assert judge_state(tmp_path, ours, {**kept, **expected}, PLAINLY, ends=ends) == outcome
    assert judge_state(tmp_path, {**kept, **expected}, kept, PLAINLY, ends=ends) == Outcome.WRONG
    large = carried(function, file=unsaved("a list of 100,000 elements"))
    assert judge_state(tmp_path, kept, {**kept, **large}, PLAINLY, ends=ends) == Outcome.WRONG


SAID = "[machine 0] swift_ft: each replica has {} for itself: this worker keeps its own, as it was in"
LOSS = SAID.format("(loop).loss")


@pytest.mark.parametrize(
    ("function", "recovery", "said", "outcome"),
    [
        ("(loop)", {**AFTER_ALL, "restored": [0]}, LOSS, Outcome.BOUNDED),
        (
            "(loop)",
            {**AFTER_ALL, "restored": [0]},
            SAID.format("(loop).a, (loop).loss, ..."),
            Outcome.BOUNDED,
        ),
        ("(loop)", {**AFTER_ALL, "restored": [0]}, LOSS.replace("0]", "7 rank 0]"), Outcome.BOUNDED),
        ("", {**AFTER_ALL, "restored": [1, 0]}, SAID.format("loss"), Outcome.BOUNDED),
        ("(loop)", {**AFTER_ALL, "restored": [0]}, SAID.format("(loop).total"), Outcome.WRONG),
        ("(loop)", {**AFTER_ALL, "restored": [0]}, LOSS.replace("0]", "1]"), Outcome.WRONG),
        ("(loop)", {**AFTER_ALL, "restored": [1]}, LOSS, Outcome.WRONG),
        ("(loop)", {**PLAINLY, "restored": [0]}, LOSS, Outcome.WRONG),
        ("(loop)", {**AFTER_ALL, "restored": [0]}, "", Outcome.WRONG),
        ("(epochs)", {**AFTER_ALL, "restored": [0]}, LOSS, Outcome.WRONG),
    ],
)
def test_a_variable_that_each_replica_has_for_itself_is_lost_with_the_last_step(
    tmp_path: Path, function: str, recovery: dict[str, Any], said: str, outcome: Outcome
) -> None:
    new_own(tmp_path)
    output_of(tmp_path).write_text(said)
    found, expected = carried(function, loss=5.4), carried(function, loss=5.2)
    assert judge_state(tmp_path, found, expected, recovery) == outcome
    other = digests_of({"weight": 1.0}, "worker 0.model"), digests_of({"weight": 2.0}, "worker 0.model")
    assert judge_state(tmp_path, {**found, **other[0]}, {**expected, **other[1]}, recovery) == Outcome.WRONG


def test_digests_that_workers_have_compared_are_told_from_values() -> None:
    """They differ with any value, also where it may: for none of its reasons."""
    saved = TrainingState({"model": nn.Linear(2, 2)}).to_save({"model.weight": 7})
    names = digests_of(unpack(saved["plain"]["bytes"].getvalue()), "worker 0.plain.bytes")
    (compared,) = [name for name in names if judging._DIGESTS in name]
    assert compared.endswith(".model.weight")
