"""The command line of ``swift-chaos``: runs are stand-ins here, and no process begins."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import shlex
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.chaos.main import _campaign, _plan, main, parser
from swift_ft.cli.chaos.repeating import Repeats
from swift_ft.errors import SwiftError
from swift_ft.faults import Fault
from swift_ft.testing.chaos import campaign
from swift_ft.testing.chaos.launchers import LAUNCHERS
from swift_ft.testing.chaos.plain_trial import Likeness, likeness
from swift_ft.testing.chaos.trial import Outcome, Training, Trial
from swift_ft.testing.chaos.unstable import Unstable

PLAN = "kill machine=1 iteration=2 point=optimizer"
STATE = {"iteration": "4", "worker 0.weight": "right"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a finding leaves is kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


Run = Callable[[Path, Sequence[Fault]], Trial]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], list[Path]]:
    """Puts a function in the place of all runs. Returns the folders that they get."""

    def put(run: Run) -> list[Path]:
        folders = []

        def run_trial(
            training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any
        ) -> Trial:
            LAUNCHERS.check()
            (folder / "file").touch()
            folders.append(folder)
            return run(folder, plan)

        monkeypatch.setattr(campaign, "run_trial", run_trial)
        return folders

    return put


def trial(
    folder: Path, plan: Sequence[Fault] = (), outcome: Outcome = Outcome.IDENTICAL, **facts: Any
) -> Trial:
    return Trial("; ".join(map(str, plan)), outcome, 0, "", facts.pop("state", STATE), folder, **facts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--store", "/shared/store"], "--store /shared/store would be one store of all runs: put {folder}"),
        (["--store", "s3://bucket/folder"], "put {folder} into it"),
        (["--plan", ""], "--plan has no fault in it"),
        (["--plan", " ; "], "--plan has no fault in it"),
        (["--see", "3"], "--see"),
        (["--keep", "/dev/null/folder"], "No folder can be made in --keep /dev/null/folder"),
    ],
)
def test_a_mistake_gets_one_line(
    options: list[str], words: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--", script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-chaos: ")
    assert words in line


@pytest.mark.parametrize("option", ["-m", "--module"])
def test_a_module_is_run_by_its_name(
    option: str, runs: Callable[[Run], list[Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    """And the command that repeats a run names it."""
    runs(lambda folder, plan: trial(folder, plan, Outcome.CRASHED if plan else Outcome.IDENTICAL))
    assert main(["--plan", PLAN, "--no-shrink", "--json", "--", option, "package.train", "--lr", "1"]) == 1
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    assert run["repeat"].endswith(" -- -m package.train --lr 1")


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("way", [".", "kept", "deep/kept"])
def test_a_folder_that_is_given_keeps_what_is_in_it(
    tmp_path: Path, script: str, runs: Callable[[Run], list[Path]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Files of the user's, also under the names that runs have."""
    monkeypatch.chdir(tmp_path)
    mine = [tmp_path / way / name / "mine" for name in ("undisturbed", "seed-0", "torchrun")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.touch()
    folders = runs(trial)
    assert main(["--keep", way, "--plan", PLAN, "--", script]) == 0
    assert all(path.exists() for path in mine)
    assert {folder.parent.parent for folder in folders} == {tmp_path / way}
    assert not any(folder.parent.exists() for folder in folders)


def test_what_a_finding_left_is_kept(tmp_path: Path, script: str, runs: Callable[[Run], list[Path]]) -> None:
    folders = runs(lambda folder, plan: trial(folder, plan, Outcome.CRASHED if plan else Outcome.IDENTICAL))
    assert main(["--keep", str(tmp_path / "kept"), "--no-shrink", "--plan", PLAN, "--", script]) == 1
    assert (folders[-1] / "file").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("parallel", ["1", "2"])
def test_a_signal_ends_all_with_its_code_and_no_file_is_left(
    script: str, runs: Callable[[Run], list[Path]], number: signal.Signals, code: int, parallel: str
) -> None:
    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        if plan:
            LAUNCHERS.stop(number)
            LAUNCHERS.check()
        return trial(folder, plan)

    folders = runs(run)
    assert main(["--plans", "50", "--parallel", parallel, "--", script]) == code
    assert len(folders) <= 3
    assert not folders[0].parent.exists()


def test_a_signal_leaves_what_was_found_before(script: str, runs: Callable[[Run], list[Path]]) -> None:
    """Also one that comes in the search for a smaller plan."""

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        if "-again-" in folder.name:
            signal.raise_signal(signal.SIGINT)
            LAUNCHERS.check()
        return trial(folder, plan, Outcome.CRASHED if plan else Outcome.IDENTICAL)

    folders = runs(run)
    assert main(["--plan", f"{PLAN}; kill machine=0 iteration=3", "--", script]) == 130
    assert (folders[1] / "file").exists()


# ------------------------------------------------------------------------------------------------ repeats


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["--seed", "4", "--plans", "2", "--most", "5", "--faults", "kill"], []),
        (["--plan", "stop machine=0 iteration=1"], []),
        (["--spares", "0"], []),  # the number that the run had takes its place
        (["--habits", "--seed", "4"], ["--seed", "9", "--habits"]),
        (["--torchrun", "--keep", "a folder"], ["--torchrun", "--keep", "a folder"]),
        (["--deadline", "1m30s", "--json"], ["--deadline", "90", "--json"]),
        (["--launch=--helpers"], ["--launch=--helpers"]),
    ],
)
def test_a_plan_is_repeated(given: list[str], options: list[str]) -> None:
    script = ["a.py", "--plan", "x"]
    repeats = Repeats(parser(), parser().parse_args([*given, "--", *script]), script, spares=3)
    made = shlex.split(repeats.of_plan(PLAN, seed=9))[1:]
    assert made[made.index("--") + 1 :] == script
    own = parser().parse_args(made)
    expected = parser().parse_args(["--plan", PLAN, "--spares", "3", *options, "--", *script])
    assert own == expected
    assert made[:2] == ["--plan", PLAN]


def test_a_repeated_plan_has_the_spares_and_the_habits_that_its_run_had(
    script: str, runs: Callable[[Run], list[Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The default number of spares follows from ``--most``, and the habits from the seed."""
    runs(lambda folder, plan: trial(folder, plan, Outcome.CRASHED if plan else Outcome.IDENTICAL))
    options = ["--most", "5", "--habits", "--seed", "7", "--plans", "1", "--shrink-runs", "1", "--json"]
    assert main([*options, "--", script]) == 1
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    again = parser().parse_args(shlex.split(run["repeat_smallest"])[1:])
    assert (again.spares, again.seed, again.habits, again.most) == (5, 7, True, 3)
    made = _campaign(again, (script,), _plan(again), again.spares)
    assert made.training.launch[made.training.launch.index("--spares") + 1] == "5"
    made.folder.rmdir()


def test_the_plan_that_failed_is_repeated_not_its_seed(
    script: str, runs: Callable[[Run], list[Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    """A seed draws from the points of an undisturbed run, and first a plan of which nothing struck here."""
    plans = []

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        if not plan:
            return trial(folder, points=frozenset({"optimizer", "between"}))
        plans.append("; ".join(map(str, plan)))
        return trial(folder, plan, Outcome.NOT_STRUCK if len(plans) == 1 else Outcome.WRONG, state={})

    runs(run)
    assert main(["--plans", "1", "--seed", "4", "--no-shrink", "--json", "--", script]) == 1
    (one,) = json.loads(capfd.readouterr().out)["runs"]
    again = parser().parse_args(shlex.split(one["repeat"])[1:])
    assert again.plan == plans[1] != plans[0]


def test_each_run_has_a_folder_of_its_own(script: str, runs: Callable[[Run], list[Path]]) -> None:
    """Its name is in the name of the run's store, where a second try must not meet the first one."""

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        outcome = Outcome.NOT_STRUCK if plan and len(folders) < 3 else Outcome.CRASHED
        return trial(folder, plan, outcome if plan else Outcome.IDENTICAL)

    folders = runs(run)
    assert main(["--plans", "2", "--faults", "kill", "--shrink-runs", "4", "--", script]) == 1
    names = [folder.name for folder in folders]
    assert len({*names}) == len(names) > 8
    assert {"undisturbed", "seed-0", "seed-0-2", "seed-1"} < {*names}


# --------------------------------------------------------------------------------------------- smaller plans


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_search_for_a_smaller_plan_takes_a_place_of_those_that_run_at_a_time(
    script: str, runs: Callable[[Run], list[Path]], parallel: int
) -> None:
    """The first seed fails, and its plan is run again, while that of the second seed is run."""
    lock, now, most = threading.Lock(), 0, 0
    together = threading.Barrier(2)

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        nonlocal now, most
        with lock:
            now += 1
            most = max(now, most)
        if folder.name in ("seed-0-again", "seed-1"):
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.5)  # for the other one, which comes if there is a place for it
        with lock:
            now -= 1
        return trial(folder, plan, Outcome.CRASHED if "seed-0" in folder.name else Outcome.IDENTICAL)

    folders = runs(run)
    options = ["--plans", "2", "--shrink-runs", "1", "--parallel", str(parallel)]
    assert main([*options, "--", script]) == 1
    assert {"seed-0-again", "seed-1"} < {folder.name for folder in folders}
    assert most <= parallel


def test_a_failure_that_does_not_come_again_is_called_one(
    script: str, runs: Callable[[Run], list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        return trial(folder, plan, Outcome.WRONG if folder.name == "seed-0" else Outcome.IDENTICAL)

    folders = runs(run)
    plan = f"{PLAN}; kill machine=0 iteration=3"
    assert main(["--plan", plan, "--", script]) == 1
    said = capsys.readouterr().out
    assert "not each time: run once more, it ended as identical" in said
    assert "smallest" not in said
    assert len(folders) == 4  # with a second undisturbed run, as values differ


@pytest.mark.parametrize(("reason", "faults"), [("stage 1 at 10:4 is unlike", 1), ("it has no data", 2)])
def test_a_smaller_plan_fails_by_the_same_cause(
    script: str,
    runs: Callable[[Run], list[Path]],
    capfd: pytest.CaptureFixture[str],
    reason: str,
    faults: int,
) -> None:
    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        made = trial(folder, plan, Outcome.CRASHED if plan else Outcome.IDENTICAL)
        return replace(made, reason=reason if len(plan) == 1 else "stage 2 at 10:9 is unlike")

    runs(run)
    plan = f"{PLAN}; kill machine=0 iteration=0"
    assert main(["--plan", plan, "--json", "--", script]) == 1
    (one,) = json.loads(capfd.readouterr().out)["runs"]
    assert one["again"] == "CRASHED"
    assert one["smallest"].count("kill") == faults


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError()])
def test_a_full_folder_gets_one_line(
    script: str, runs: Callable[[Run], list[Path]], capsys: pytest.CaptureFixture[str], error: OSError
) -> None:
    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        raise error

    runs(run)
    assert main(["--plan", PLAN, "--", script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-chaos: Files of the runs cannot be written or read: ")
    assert "--keep" in line


# ------------------------------------------------------------------------------------------ undisturbed runs


def test_an_undisturbed_run_that_recovered_is_no_reference(
    script: str, runs: Callable[[Run], list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = runs(lambda folder, plan: trial(folder, plan, ways=() if plan else ("replica",)))
    assert main(["--plan", PLAN, "--", script]) == 2
    line = capsys.readouterr().err
    assert "The undisturbed run was disturbed: it recovered (replica)" in line
    assert "--launch '--heartbeat-timeout 20'" in line
    assert len(folders) == 1


def test_an_error_in_the_middle_does_not_hide_what_was_found(
    script: str, runs: Callable[[Run], list[Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The first run differs, and so do undisturbed ones; the second one would have followed."""
    clock = itertools.count()

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        if plan and folder.name == "seed-0":
            return trial(folder, plan, Outcome.HUNG, state={})
        state = {**STATE, "worker 0.weight": str(next(clock))}
        return trial(folder, plan, Outcome.WRONG if plan else Outcome.IDENTICAL, state=state)

    runs(run)
    assert main(["--plans", "3", "--no-shrink", "--json", "--", script]) == 2
    said = capfd.readouterr()
    facts = json.loads(said.out)
    assert [one["outcome"] for one in facts["runs"]] == ["HUNG"]
    assert (facts["ok"], facts["counts"]) == (False, {"HUNG": 1})
    assert facts["error"].startswith("The script is not deterministic: 1 values of two undisturbed runs")
    assert said.err.startswith("swift-chaos: The script is not deterministic")


def test_an_error_at_once_is_an_object_too(
    script: str, runs: Callable[[Run], list[Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    runs(lambda folder, plan: trial(folder, plan, Outcome.HUNG))
    assert main(["--json", "--", script]) == 2
    facts = json.loads(capfd.readouterr().out)
    assert facts["runs"] == []
    assert "The undisturbed run ended as HUNG" in facts["error"]


@pytest.mark.parametrize(("differs", "code"), [("file time.txt", 0), ("file out.txt", 1)])
def test_files_that_differ_between_undisturbed_runs_are_not_compared_with_torchrun(
    script: str,
    runs: Callable[[Run], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    differs: str,
    code: int,
) -> None:
    clock = itertools.count()

    def run(folder: Path, plan: Sequence[Fault]) -> Trial:
        state = {**STATE, "file time.txt": str(next(clock)), "file out.txt": "right"}
        return trial(folder, plan, state=state)

    folders = runs(run)
    plain = {**STATE, "file time.txt": "0", "file out.txt": "right"}
    monkeypatch.setattr(campaign, "plain_state", lambda *_: {**plain, differs: "another"})
    assert main(["--torchrun", "--json", "--plan", PLAN, "--", script]) == code
    facts = json.loads(capfd.readouterr().out)
    assert facts["torchrun"]["differ"] == ([] if code == 0 else [differs])
    assert facts["not_compared"] == ["file time.txt"]
    assert sum(folder.name.startswith("undisturbed") for folder in folders) == 2


ALL_STABLE = Unstable()


def test_runs_that_are_alike_under_torchrun_need_no_second_look() -> None:
    assert likeness({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, ALL_STABLE) == Likeness(1, ())
    assert likeness({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, ALL_STABLE) == Likeness(2, ("b",))
    unstable = Unstable(unlike=frozenset({"b"}))
    assert likeness({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, unstable) == Likeness(1, ())


def test_a_file_that_only_one_run_has_differs_from_torchrun() -> None:
    """A script that is told apart by its launcher writes another file, or none."""
    out = "file out.txt"
    assert likeness({"a": "1", out: "2"}, {"a": "1"}, ALL_STABLE) == Likeness(2, (out,))
    assert likeness({"a": "1"}, {"a": "1", out: "2"}, ALL_STABLE) == Likeness(2, (out,))
    assert likeness({}, {out: "2"}, ALL_STABLE) == Likeness(1, (out,))
    unlike = Unstable(unlike=frozenset({out, "worker 0.plain.bytes.carried.began"}))
    assert likeness({"a": "1"}, {"a": "1", out: "2"}, unlike) == Likeness(1, (out,)), "whatever it holds"
    assert likeness({"a": "1", "file store/": "2"}, {"a": "1"}, ALL_STABLE) == Likeness(1, ()), "its store"


def test_a_file_s_name_may_hold_a_time_under_torchrun_too() -> None:
    one, another = ({"a": "1", f"file log-{time}.txt": "x"} for time in (1, 2))
    unstable = Unstable.between(one, another)
    assert likeness({"a": "1", "file log-5.txt": "y"}, one, unstable) == Likeness(1, ())
    assert likeness({"a": "1"}, one, unstable) == Likeness(1, ("file log-*.txt",)), "none at all"


def test_nothing_to_compare_with_torchrun() -> None:
    with pytest.raises(SwiftError, match="left nothing"):
        likeness({"a": "1"}, {"b": "1"}, ALL_STABLE)
