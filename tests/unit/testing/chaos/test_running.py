"""A disturbed run may take as long as its faults let it, and meets no other run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.run import parser as run_parser
from swift_ft.faults import parse_faults
from swift_ft.testing.chaos.launchers import LAUNCHERS, LauncherEnd
from swift_ft.testing.chaos.running import limit_of, run_trial
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

UNDISTURBED = Trial("", Outcome.IDENTICAL, 0, "", {}, Path("run"), wall_s=100.0)


@pytest.mark.parametrize(
    ("plan", "at_least"),
    [
        ("slow worker=1 iteration=1 factor=5", 500),
        ("slow worker=1 iteration=1", 300),
        ("slow worker=0 iteration=1 factor=8; slow worker=1 iteration=1 factor=2", 800),
        ("suspend machine=1 iteration=1 seconds=400", 500),
        ("lag worker=1 iteration=1 seconds=200; vanish worker=0 iteration=3 seconds=250", 550),
        ("kill machine=1 iteration=7; kill machine=0 iteration=8", 300),
        ("kill machine=1 iteration=7; kill machine=0 iteration=8; kill machine=1 iteration=8", 400),
        ("slow worker=0 iteration=1 factor=5; kill machine=1 iteration=8", 750),
    ],
)
def test_what_faults_cost_is_no_hang(plan: str, at_least: float) -> None:
    limit = limit_of(Training((), (), "", 10.0), parse_faults(plan), UNDISTURBED)
    assert at_least <= limit < 2 * at_least + 200


def test_runs_at_a_time_share_the_cores_of_a_host() -> None:
    plan, training = parse_faults("kill machine=1 iteration=7"), Training((), (), "", 10.0)
    alone = limit_of(training, plan, UNDISTURBED)
    assert limit_of(training, plan, UNDISTURBED, parallel=4) >= alone + 3 * 2 * UNDISTURBED.wall_s


SHARED = ("--rdzv-backend", "etcd-v3", "--rdzv_endpoint=h:2379")


@pytest.mark.parametrize(
    ("launch", "names"),
    [
        (SHARED, ["chaos-campaign-seed-0", "chaos-campaign-seed-0-again"]),
        ((*SHARED, "--rdzv-id", "mine"), ["chaos-campaign-seed-0", "chaos-campaign-seed-0-again"]),
        (("--rdzv_endpoint", "etcd://h:2379"), ["chaos-campaign-seed-0", "chaos-campaign-seed-0-again"]),
        (("--rdzv-id", "mine"), ["mine", "mine"]),
        (("--standalone",), ["none", "none"]),
    ],
)
def test_runs_in_a_rendezvous_store_of_others_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: tuple[str, ...], names: list[str]
) -> None:
    """Else they would join each other, or the user's own job."""
    found: list[str] = []

    def run(arguments: Sequence[str], folder: Path, *_: Any, output: Path, **__: Any) -> LauncherEnd:
        output.touch()
        found.append(run_parser().parse_args(arguments[1:]).rdzv_id)
        return LauncherEnd(0)

    monkeypatch.setattr(LAUNCHERS, "run", run)
    for name in ("seed-0", "seed-0-again"):
        folder = tmp_path / "campaign" / name
        folder.mkdir(parents=True)
        run_trial(Training(launch, ("train.py",), "", 10.0), folder)
    assert found == names


def test_the_limit_that_was_asked_for_is_the_shortest() -> None:
    """A clock that jumps by a day takes no time."""
    plan = parse_faults("clock worker=1 iteration=1 seconds=-86400; kill machine=1 iteration=3")
    assert limit_of(Training((), (), "", 5000.0), plan, UNDISTURBED) == 5000.0
    assert limit_of(Training((), (), "", 10.0), plan, UNDISTURBED) < 1000


@pytest.mark.parametrize(
    ("store", "away"),
    [
        ("{folder}/store", "run/store.away"),
        ("file://{folder}/store/", "run/store.away"),
        ("", "run/out/store.away"),
        ("{folder}-elsewhere/store", "run-elsewhere/store.away"),
    ],
)
def test_a_store_that_has_vanished_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, away: str
) -> None:
    """Wherever it is. A folder of the script is none of it, whatever its name."""
    (tmp_path / "run" / "plots.away").mkdir(parents=True)
    gone = tmp_path / away
    (gone / "checkpoints").mkdir(parents=True)
    (gone / "run.json").touch()
    looks: list[bool] = []

    def run(arguments: Sequence[str], folder: Path, *_: Any, output: Path, **__: Any) -> LauncherEnd:
        output.touch()
        return LauncherEnd(1)

    def check() -> None:
        looks.append(gone.exists())
        gone.rename(gone.with_name("store"))

    monkeypatch.setattr(LAUNCHERS, "run", run)
    monkeypatch.setattr(LAUNCHERS, "check", check)
    plan = parse_faults("vanish worker=1 iteration=1")
    began = time.monotonic()
    run_trial(Training((), ("train.py",), store, 10.0), tmp_path / "run", plan)
    assert looks == [True]
    assert time.monotonic() - began < 30
