"""The campaign over all topologies: it keeps every place busy, and goes on where it was interrupted."""

from __future__ import annotations

import json
import math
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.recovery import campaign as benchmark
from benchmarks.recovery.campaign import TOPOLOGIES, _run
from swift_ft.cli.options import config_from
from swift_ft.cli.run import parser as run_parser
from swift_ft.config.option_mistakes import check_domains
from swift_ft.faults import Fault
from swift_ft.testing.chaos import campaign
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

NAME = "replicas 2x1"
PLACE = "replicas-2x1"
SERVER = object()


class Runs:
    """Stands in for real runs, and notes them.

    Attributes:
        seeds: of all disturbed ones, in the order in which they began.
        trainings: of all runs by seed; None is the undisturbed one's.
        slow: a seed whose first run waits until ``others`` of later seeds have ended.
        failing: seeds that end by themselves.
    """

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.trainings: dict[int | None, Training] = {}
        self.slow, self.others = -1, 0
        self.failing: frozenset[int] = frozenset()
        self._ended = 0
        self._changed = threading.Condition()

    def __call__(
        self, training: Training, folder: Path, plan: Sequence[Fault] = (), *_: Any, **__: Any
    ) -> Trial:
        seed = int(folder.name.split("-")[1]) if folder.name.startswith("seed-") else None
        self.trainings[seed] = training
        if seed is None:
            return Trial("", Outcome.IDENTICAL, 0, "", {"iteration": "8"}, folder, wall_s=5.0)
        self.seeds.append(seed)
        with self._changed:
            if seed == self.slow:
                assert self._changed.wait_for(lambda: self._ended >= self.others, timeout=20), "a place idles"
            else:
                self._ended += 1
                self._changed.notify_all()
        outcome = Outcome.CRASHED if seed in self.failing else Outcome.IDENTICAL
        text = "; ".join(map(str, plan))
        return Trial(text, outcome, 0, "", {"iteration": "8"}, folder, wall_s=2.0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(campaign, "run_trial", made)
    monkeypatch.setattr(benchmark, "lacking", lambda: "root")
    monkeypatch.setattr(benchmark, "ForkServer", lambda: nullcontext(SERVER))
    return made


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / PLACE / "outcomes.jsonl").read_text().splitlines()]


def run(folder: Path, plans: int, *, seed: int = 0, minutes: float = 1e9) -> list[Trial]:
    return _run(NAME, folder, seed, plans, 2, "kill", minutes)


def test_a_slow_run_keeps_no_other_one_waiting(runs: Runs, tmp_path: Path) -> None:
    """Those that are over are noted meanwhile, and reported in the order of their seeds."""
    runs.slow, runs.others = 0, 5
    trials = run(tmp_path, 6)
    assert [trial.seed for trial in trials] == [*range(6)]
    noted = [line["seed"] for line in lines(tmp_path)]
    assert (sorted(noted), noted[:4]) == ([*range(6)], [1, 2, 3, 4])


def test_outcomes_say_what_a_seed_has_cost(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its earlier attempts, whose faults did not strike. They are read again."""
    first = {3}

    def run_trial(training: Training, folder: Path, *more: Any, **options: Any) -> Trial:
        trial = runs(training, folder, *more, **options)
        if folder.name == "seed-3" and first:
            first.clear()
            return replace(trial, outcome=Outcome.NOT_STRUCK)
        return trial

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    run(tmp_path, 4)
    found = {line["seed"]: (line["attempts"], line["spent_s"]) for line in lines(tmp_path)}
    assert found == {0: (1, 2.0), 1: (1, 2.0), 2: (1, 2.0), 3: (2, 4.0)}
    assert [(trial.attempts, trial.spent_s) for trial in run(tmp_path, 4)] == [*[(1, 2.0)] * 3, (2, 4.0)]


def test_a_campaign_goes_on_with_the_seeds_that_are_missing(runs: Runs, tmp_path: Path) -> None:
    run(tmp_path, 6, seed=10)
    outcomes = tmp_path / PLACE / "outcomes.jsonl"
    kept = [line for line in lines(tmp_path) if line["seed"] not in (11, 14)]
    outcomes.write_text("".join(json.dumps(line) + "\n" for line in kept))
    runs.seeds.clear()
    assert [trial.seed for trial in run(tmp_path, 8, seed=10)] == [*range(10, 18)]
    assert sorted(runs.seeds) == [11, 14, 16, 17]
    runs.seeds.clear()
    assert len(run(tmp_path, 8, seed=10)) == 8
    assert runs.seeds == []


def test_outcomes_without_seeds_count_in_their_order(runs: Runs, tmp_path: Path) -> None:
    """As they were noted when no run was noted before those of earlier seeds."""
    place = tmp_path / PLACE
    place.mkdir()
    old = [{"plan": f"kill machine={i} iteration=1", "outcome": "identical", "code": 0} for i in range(3)]
    (place / "outcomes.jsonl").write_text("".join(json.dumps({**one, "reason": ""}) + "\n" for one in old))
    trials = run(tmp_path, 5, seed=20)
    assert sorted(runs.seeds) == [23, 24]
    assert [trial.seed for trial in trials] == [*range(20, 25)]
    assert [trial.plan for trial in trials[:3]] == [one["plan"] for one in old]


def test_the_start_of_an_interpreter_stays_among_what_is_tried(runs: Runs, tmp_path: Path) -> None:
    """The undisturbed run and one seed of twenty are executed, all others are forked."""
    run(tmp_path, 22, seed=30)
    assert runs.trainings.keys() == {None, *range(30, 52)}
    executed = {seed for seed, training in runs.trainings.items() if training.server is None}
    assert executed == {None, 40}
    assert all(training.server in (None, SERVER) for training in runs.trainings.values())


def parsed(training: Training) -> Namespace:
    args = run_parser().parse_args([*training.launch, *training.script])
    check_domains(config_from(args), args.machines + args.spares)
    return args


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_run_has_a_spare_for_each_fault(name: str, runs: Runs, tmp_path: Path) -> None:
    """One in ten has three, whatever its plan. Each machine has its own failure domain in all of them.

    Where a topology says how many it has, all runs have these.
    """
    plans = {trial.seed: trial.plan for trial in _run(name, tmp_path, 40, 10, 2, "kill", 1e9)}
    found = {seed: parsed(training).spares for seed, training in runs.trainings.items()}
    assert found.pop(None) == 0
    if (own := TOPOLOGIES[name].spares) is not None:
        assert {*found.values()} == {own}
        return
    assert found.pop(43) == 3
    assert found == {seed: plan.count(";") + 1 for seed, plan in plans.items() if seed != 43}
    assert {1, 2, 3} == {*found.values()}


def test_topologies_meet_unlike_faults(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same seeds, first faults would be alike in all of them. One alone has its own, too."""
    everywhere = ["campaign", "--plans", str(3 * len(TOPOLOGIES)), "--keep", str(tmp_path), "--json"]
    monkeypatch.setattr("sys.argv", everywhere)
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    seeds = {name: [trial["seed"] for trial in trials] for name, trials in found.items()}
    assert seeds.keys() == TOPOLOGIES.keys()
    assert len({*chain(*seeds.values())}) == 3 * len(TOPOLOGIES)
    monkeypatch.setattr("sys.argv", [*everywhere[:2], "3", "--keep", str(tmp_path / "one"), "--only", NAME])
    benchmark.main()
    assert sorted(line["seed"] for line in lines(tmp_path / "one")) == seeds[NAME]


def test_a_report_says_what_has_struck(tmp_path: Path) -> None:
    """By kind and by point. A fault that is in a plan twice may have struck once."""
    kill, flip = "kill machine=1 iteration=3 point=forward", "flip worker=0 iteration=any point=load"
    trials = [
        Trial("; ".join(plan), Outcome.IDENTICAL, 0, "", {}, tmp_path, missed=missed, ways=ways)
        for plan, missed, ways in [
            ((kill, flip), (flip,), ("replay", "restart")),
            ((kill, kill), (kill,), ("replay",)),
        ]
    ]
    said = benchmark.report({NAME: trials}, 0, 1.0)
    assert "by kind: kill 2/3, flip 0/1." in said
    assert "By point: forward 2/3, load 0/1." in said
    assert "Recoveries: replay 2, restart 1." in said
    assert "Recoveries: none." in benchmark.report({NAME: []}, 0, 1.0)


def test_outcomes_say_what_has_not_struck(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read again."""

    def run_trial(*given: Any, **options: Any) -> Trial:
        trial = runs(*given, **options)
        return replace(trial, missed=(trial.plan,), ways=("replay",)) if trial.plan else trial

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    found = [(trial.missed, trial.ways) for trial in run(tmp_path, 3)]
    assert found == [((trial.plan,), ("replay",)) for trial in run(tmp_path, 3)]


@pytest.mark.parametrize(
    ("outcome", "code", "read"),
    [("ended", 0, "damaged"), ("ended", 1, "ended"), ("damaged", 0, "damaged"), ("WRONG", 0, "WRONG")],
)
def test_a_damaged_checkpoint_is_an_outcome_of_its_own(
    outcome: str, code: int, read: str, tmp_path: Path, runs: Runs
) -> None:
    """Also where it was noted when it was none."""
    place = tmp_path / PLACE
    place.mkdir()
    noted = {"plan": "flip worker=0 iteration=1", "outcome": outcome, "code": code, "reason": "why"}
    (place / "outcomes.jsonl").write_text(json.dumps({**noted, "seed": 20}) + "\n")
    trials = run(tmp_path, 1, seed=20)
    assert [trial.outcome for trial in trials] == [read]
    said = benchmark.report({NAME: trials}, 0, 1.0)
    head, _, row = said.splitlines()[2:5]
    counted = dict(zip(head.split("|"), row.split("|"), strict=True))
    assert {name.strip() for name, count in counted.items() if count.strip() == "1"} > {read.lower()}
    assert (f"- 1 {read}: why" in said) == (read != "WRONG")


def test_no_plan_begins_after_the_time(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have begun come to their end."""
    clock = chain([0.0], repeat(math.inf))
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    (trial,) = run(tmp_path, 6, minutes=1)
    assert [line["seed"] for line in lines(tmp_path)] == [trial.seed]
    assert runs.seeds == [trial.seed]


def test_findings_are_printed_when_they_end(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = frozenset({2})
    trials = run(tmp_path, 4)
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"{NAME}: CRASHED: {trials[2].plan}: "
    assert (tmp_path / PLACE / "seed-2").is_dir()
