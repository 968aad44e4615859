"""The runs of a campaign: which are run again, and which count as they are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import SwiftError
from swift_ft.faults import Fault, parse_faults
from swift_ft.storage.store import Store
from swift_ft.testing.chaos import campaign
from swift_ft.testing.chaos.campaign import Campaign
from swift_ft.testing.chaos.judging import End, judged, judged_again
from swift_ft.testing.chaos.plans import Shape
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

AT_A_TIME = 2


def test_runs_side_by_side_learn_of_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that differs between undisturbed runs is no finding, however many meet it at a time.

    All compare with what is known before any of them has ended.
    """
    clock, together = itertools.count(), threading.Barrier(AT_A_TIME, timeout=20)
    first = itertools.count()

    def run_trial(training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any) -> Trial:
        state = {"iteration": "4", "file times.txt": str(next(clock))}
        if not plan:
            return Trial("", Outcome.IDENTICAL, 0, "", state, folder)
        if next(first) < AT_A_TIME:
            together.wait()
        outcome = Outcome.IDENTICAL if "file times.txt" in training.unstable.unlike else Outcome.WRONG
        return Trial("; ".join(map(str, plan)), outcome, 0, "", state, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    plan = parse_faults("kill machine=0 iteration=1")
    shape, training = Shape(2, 1, 4), Training((), (), "", 10)
    made = Campaign(training, shape, tmp_path, 0, AT_A_TIME, AT_A_TIME, learns=True, given=plan)
    assert [trial.outcome for trial in made.run()] == [Outcome.IDENTICAL] * AT_A_TIME


@pytest.mark.parametrize(("saved", "at"), [("8", None), ("4", 8), (None, 8)])
def test_the_last_iteration_is_saved_in_all_runs(
    saved: str | None, at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what comes after the last checkpoint is not compared, and a short training not at all."""
    seen = []

    def run_trial(training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any) -> Trial:
        seen.append(training.checkpoint_at)
        last = training.checkpoint_at or saved
        outcome, state = (Outcome.IDENTICAL, {"iteration": str(last)}) if last else (Outcome.WRONG, {})
        return Trial("; ".join(map(str, plan)), outcome, 0, "", state, folder, completed=8)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    made = Campaign(Training((), (), "", 10), Shape(2, 1, 4), tmp_path, 0, plans=2, learns=True)
    references = made.prepare()
    assert {reference.trial.iterations for reference in references.values()} == {8}
    assert [trial.outcome for trial in made.run(references)] == [Outcome.IDENTICAL] * 2
    assert seen == [*[None] * (at is not None), *[at] * 3]


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


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (["usage"], ""),
        (["CheckpointCommitted", "usage"], "ended as NO CHECKPOINT \\(swift-run: it failed\\)"),
        (["its own"], "ended as CRASHED \\(no fault of the plan can have caused this: it failed\\)"),
        ([], "ended as CRASHED \\(it left no events"),
    ],
)
def test_a_habit_is_refused_with_a_line_for_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str], error: str
) -> None:
    """An error of the program is none, and no answer takes a checkpoint away."""

    def event(position: int, name: str) -> dict[str, Any]:
        if name == "CheckpointCommitted":
            return {"event": name, "iteration": 4, "position": position}
        failed = {"event": "ScriptFailed", "reason": "it failed", "cause": ""}
        return {**failed, "usage": name == "usage", "position": position}

    def run_trial(training: Training, folder: Path, *_: Any, **__: Any) -> Trial:
        report = {"events": [event(*one) for one in enumerate(events)]}
        end = End(1, "swift-run: it failed\n", 1.0, [], report)
        outcome, reason, state = judged(training, folder, (), end, None)
        return Trial("", outcome, 1, reason, state, folder, training.habits)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    training = Training((), (), "{folder}/store", 10)
    made = Campaign(training, Shape(2, 1, 4), tmp_path, 0, plans=1, habits=True, learns=True)
    if not error:
        assert [trial.outcome for trial in made.run()] == [Outcome.ENDED]
    else:
        with pytest.raises(SwiftError, match=error):
            [*made.run()]


Stub = Callable[[int], dict[str, str]]


def campaign_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, state_of: Stub, *, disturbed: Stub | None = None
) -> tuple[Trial, list[str]]:
    """The run of one plan, judged by its state, and all that was not compared.

    Args:
        folder: of the runs.
        monkeypatch: puts a stub in the place of a run.
        state_of: the state of a run, by its number.
        disturbed: that of the disturbed one, if it is another.
    """
    clock = itertools.count()

    def run_trial(
        training: Training, folder: Path, plan: Sequence[Fault] = (), expected: Any = None, **_: Any
    ) -> Trial:
        made = disturbed if plan and disturbed is not None else state_of
        state = {"iteration": "4", "file out.txt": "1", MODEL: "1", **made(next(clock))}
        trial = Trial("; ".join(map(str, plan)), Outcome.IDENTICAL, 0, "", state, folder)
        return trial if expected is None else judged_again(trial, training, expected)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    plan = parse_faults("kill machine=0 iteration=1")
    training, shape = Training((), ("train.py",), "{folder}/store", 10), Shape(2, 1, 4)
    made = Campaign(training, shape, folder, 0, 1, learns=True, given=plan)
    references = made.prepare()
    (trial,) = made.run(references)
    return trial, sorted(references[0].unstable.names)


MODEL = "worker 0.models.model.weight"
VARIABLE = "worker 0.plain.bytes.carried.(loop)."


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("log-7", "log-8", "log-9"), "log-*"),
        (
            (
                "runs/Nov29_14-10-58_host/e.177.host.9.0",
                "runs/Nov29_14-11-02_host/e.181.host.12.0",
                "runs/Nov30_00-00-12_host/e.190.host.77.0",
            ),
            "runs/*_*-*-*_host/e.*.host.*.*",
        ),
        (
            ("wandb/run-20261129_1-x7k2/log", "wandb/run-20261129_2-abcd/log", "wandb/run-20261130_3-q9/log"),
            "wandb/run-*_*-*/log",
        ),
    ],
)
def test_a_file_that_is_named_after_the_time_is_no_finding(
    names: Sequence[str], pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third run has a third name. It is there, and it is said that it was not compared."""

    def state(number: int) -> dict[str, str]:
        return {f"file {names[number]}": str(number), "file rank-1.txt": "1"}

    trial, not_compared = campaign_of(tmp_path, monkeypatch, state)
    assert (trial.outcome, not_compared) == (Outcome.IDENTICAL, [f"file {pattern}"]), trial.reason


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, "1 of 3 values and files differ: file log-*"),
        ({"file log-9": "1", "file out.txt": "2"}, "1 of 3 values and files differ: file out.txt"),
        ({"file log-9": "1", "file other": "1"}, "1 of 4 values and files differ: file other"),
        ({"file log-9": "1", MODEL: "2"}, f"1 of 3 values and files differ: {MODEL}"),
    ],
    ids=["no such file", "another file", "a file too many", "a weight"],
)
def test_such_a_file_hides_no_other_one(
    state: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, _ = campaign_of(
        tmp_path, monkeypatch, lambda number: {f"file log-{number}": "1"}, disturbed=lambda _: state
    )
    assert (trial.outcome, trial.reason) == (Outcome.WRONG, found)


@pytest.mark.parametrize(
    ("state_of", "left_out"),
    [
        (lambda number: {"t0": str(number)}, ["t0"]),
        (lambda number: {"stats.tokens_s": str(number), "stats.loss": "1"}, ["stats.tokens_s"]),
        (lambda number: {f"times.{i}": str(number) for i in range(3 + number)}, ["times.*"]),
        (lambda number: {f"seen.{number}": "1"}, ["seen.*"]),
    ],
    ids=["a time", "a time in a dict", "a list of times", "keys that are times"],
)
def test_a_variable_that_holds_the_time_is_no_finding(
    state_of: Stub, left_out: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, not_compared = campaign_of(
        tmp_path,
        monkeypatch,
        lambda number: {VARIABLE + name: value for name, value in state_of(number).items()},
    )
    assert trial.outcome == Outcome.IDENTICAL, trial.reason
    assert not_compared == [VARIABLE + name for name in left_out]


@pytest.mark.parametrize("name", ["stats.loss", "history.0"])
def test_such_a_variable_hides_no_other_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(number: int, value: str = "1") -> dict[str, str]:
        return {f"{VARIABLE}stats.tokens_s": str(number), f"{VARIABLE}{name}": value}

    trial, _ = campaign_of(tmp_path, monkeypatch, state, disturbed=lambda number: state(number, "2"))
    assert (trial.outcome, VARIABLE + name in trial.reason) == (Outcome.WRONG, True)


@pytest.mark.parametrize("name", [MODEL, "worker 0.plain.bytes.small.parts.meters.mean"])
def test_a_state_that_differs_undisturbed_ends_the_campaign(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SwiftError, match="The script is not deterministic: 1 values"):
        campaign_of(tmp_path, monkeypatch, lambda number: {name: str(number), f"{VARIABLE}t0": str(number)})


@pytest.mark.parametrize(
    ("script", "is_shared"),
    [
        (("beside/train.py",), {"out.txt"}),
        (("beside/train.py", "--store={folder}/store"), {"out.txt", "metrics.csv"}),
        (("-m", "package.train"), {"metrics.csv"}),
        (("-m", "package.train", "--store={folder}/store"), {"metrics.csv"}),
    ],
)
def test_a_file_that_all_runs_write_is_named(
    script: tuple[str, ...], is_shared: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a script; and where the tool runs, if the script does, too, or if a module is found there."""
    here, beside, runs = tmp_path / "here", tmp_path / "beside", tmp_path / "here" / "runs"
    for folder in (here, beside, runs, here / ".git"):
        folder.mkdir()
    (here / "data").write_text("as it was")

    def run_trial(training: Training, folder: Path, *_: Any, **__: Any) -> Trial:
        for place in (here / "metrics.csv", beside / "out.txt", here / ".git" / "x", folder / "own"):
            place.write_text("1")
        return Trial("", Outcome.IDENTICAL, 0, "", {"iteration": "4"}, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    monkeypatch.chdir(here)
    script = tuple(one.replace("beside/", f"{beside}/") for one in script)
    made = Campaign(Training((), script, "", 10), Shape(2, 1, 4), runs, 0, plans=1, learns=True)
    (reference,) = made.prepare().values()
    assert {Path(name).name for name in reference.outside} == is_shared


def test_the_store_of_a_run_that_went_well_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is: that of the undisturbed run is needed until all is over."""
    runs = tmp_path / "runs"

    def stores() -> list[str]:
        root = f"memory://{runs}"
        return [name for name in Store(root).list("") if Store(f"{root}/{name}").find("")]

    def run_trial(training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any) -> Trial:
        Store(training.store_of(folder)).write_json("run.json", {})
        outcome = Outcome.CRASHED if "seed-1" in folder.name else Outcome.IDENTICAL
        return Trial("; ".join(map(str, plan)), outcome, 0, "", {"iteration": "4"}, folder)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    training = Training((), (), "memory://{folder}/store", 10)
    made = Campaign(training, Shape(2, 1, 4), runs, 0, plans=3, learns=True)
    assert [trial.outcome.is_good for trial in made.run()] == [True, False, True]
    assert stores() == ["seed-1", "undisturbed"]
    made.forget_all()
    assert stores() == []
    assert not runs.exists()


@pytest.mark.parametrize(
    "store", ["memory://bucket", "memory://{folder}", "{folder}/store", "/proc/{folder}"]
)
def test_only_the_store_of_the_run_itself_is_deleted(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a whole bucket; and one in the run's folder goes with that."""
    deleted: list[str] = []
    monkeypatch.setattr(Store, "delete_all", lambda self: deleted.append(self.root))
    made = Campaign(Training((), (), store, 10), Shape(2, 1, 4), tmp_path, 0, plans=1)
    made.forget(made.new_folder("seed-0"))
    elsewhere = "{folder}" in store and not store.startswith("{folder}")
    assert [root.endswith(f"{tmp_path}/seed-0") for root in deleted] == [True] * elsewhere
    assert not (tmp_path / "seed-0").exists()


def test_a_store_that_does_not_let_itself_be_deleted_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Campaign(Training((), (), "nosuch://{folder}", 10), Shape(2, 1, 4), tmp_path, 0, plans=1)
    made.forget(made.new_folder("seed-0"))
    assert "the store of a run that is over cannot be deleted" in caplog.text
    assert not (tmp_path / "seed-0").exists()
