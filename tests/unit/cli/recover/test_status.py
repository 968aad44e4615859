"""``swift-recover status`` with stores of runs that live, have ended, or left only a part of themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.status import run_status
from swift_ft.recovery import events as ev
from swift_ft.recovery.events import Event
from swift_ft.storage.digest import sealed
from swift_ft.testing.scenario import Scenario
from tests.support.journals import BEGAN, ONE_REPLICA_LESS, RUN, checkpoint, machine, opening, store_with

NEWER = {"format": 99, "run_id": "r", "topology": {}, "earlier": []}
SEGMENTS = {
    0: ["g00001-s000000-i00000000-00000009.arrow", "g00001-s000001-i00000010-00000014.arrow"],
    1: ["g00001-s000001-i00000010-00000011.arrow", "g00001-s000002-i00000014-00000016.arrow"],
}


def trained(spares: int = 1) -> list[Event]:
    return [*opening(3, spares=spares), *checkpoint(3, 0), *checkpoint(3, 10)]


def shown(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["status", str(folder), "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_a_run_that_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path), trained(), machines=3, segments=SEGMENTS)
    status = shown(tmp_path, capsys)
    assert (status["run_id"], status["earlier"]) == (RUN, ["job.0-ffffffff"])
    assert (status["phase"], status["generation"], status["ok"]) == ("live", 1, None)
    assert (status["checkpoints"], status["iteration"], status["checkpoint_every"]) == ([0, 10], 16, 10)
    assert (status["log_bytes"], status["log_budget_bytes"]) == (4000, 4_000_000)
    assert (status["spares"], status["problems"]) == ([machine(3)], [])
    assert 0 <= status["checkpoint_age_s"] < 600
    first, second, third = status["machines"]
    assert (first["name"], first["address"], first["way"]) == (machine(0), "host-0:1", "replay")
    assert first["logs"][0]["coverage"] == {"spans": [[10, 14]], "gaps": []}
    assert second["logs"][0]["coverage"] == {"spans": [[10, 11], [14, 16]], "gaps": [[12, 13]]}
    assert third["logs"][0]["coverage"] == {"spans": [], "gaps": []}
    assert third["loss"]["iterations_again"] == 6
    estimate = third["loss"]["estimate"]
    assert (estimate["parts"][-1]["what"], estimate["seconds"]) == (
        "replaying 6 iterations",
        pytest.approx(2.4),
    )
    assert not estimate["complete"]  # no recovery has shown how long a replacement takes


def test_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    store_with(str(tmp_path), trained(), machines=3, segments=SEGMENTS)
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in (
        f"run {RUN}",
        "no end is known: live in generation 1",
        "the last sign of life was",
        "last committed checkpoint: iteration 10",
        "one is due every 10 iterations",
        "at most 4.00 MB for each worker",
        "12 to 13",
        "6 iterations, at least 2.40 s",
    ):
        assert words in out, out


def test_signs_of_life(tmp_path: Path) -> None:
    """The newest of the journal and of all files counts: logs grow where nothing else happens."""
    store_with(str(tmp_path), opening(3), machines=3)
    last = BEGAN + len(opening(3)) - 1
    run = open_run_store(str(tmp_path))
    assert run_status(run, now=last + 12).sign_of_life_s == pytest.approx(12)
    assert run_status(run, now=last - 12).sign_of_life_s == 0.0  # another host's clock
    store_with(str(tmp_path), opening(3), machines=3, segments=SEGMENTS)
    assert 0 <= (run_status(run, now=time.time()).sign_of_life_s or 0) < 600


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [*trained(), ev.JobClosed(reason="stopped by Ctrl-C", exit_code=130)]
    store_with(str(tmp_path), events, machines=3)
    status = shown(tmp_path, capsys)
    assert (status["phase"], status["ok"], status["reason"]) == ("ended", False, "stopped by Ctrl-C")
    assert [found["loss"] for found in status["machines"]] == [None] * 3
    assert main(["status", str(tmp_path)]) == 0
    assert "ended with an error (stopped by Ctrl-C)" in capsys.readouterr().out


def test_a_loss_that_would_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [event for n in range(3) for event in lose(n)]
    store_with(str(tmp_path), [*trained(spares=3), *lost], machines=3)
    (first, *_) = shown(tmp_path, capsys)["machines"]
    assert first["way"] == "none"
    assert "more than the limit of 3" in first["loss"]["reason"]


def lose(number: int) -> list[Event]:
    """Another machine is lost in slot 0, and a spare is there already."""
    name = machine(0) if number == 0 else machine(2 + number)
    generation = 2 + number
    events: list[Event] = [ev.MachineLost(machine=name, reason="its power failed")]
    events += [
        ev.StatusReported(
            rank=rank,
            generation=generation,
            iteration=12 if rank else None,
            live=bool(rank),
            stages=(rank,),
            holds=(f"stage {rank}",),
            group=rank,
            pipeline_known=True,
        )
        for rank in range(3)
    ]
    return [*events, *(ev.WorkerReady(rank=rank, generation=generation) for rank in range(3))]


class Told(Scenario):
    """Keeps the events of its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def apply(self, event: Event) -> None:
        self.events.append(event)
        super().apply(event)


def test_a_run_that_losses_have_made_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    for line in ONE_REPLICA_LESS.splitlines():
        told.run_line(line)
    store_with(str(tmp_path), told.events, machines=4)  # its workers have not noted the smaller world yet
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "losses have made it smaller by 1 machine: it goes back to 4 as others come" in out
    assert shown(tmp_path, capsys)["smaller"]


def test_a_store_without_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its session never began, or somebody has deleted it."""
    store_with(str(tmp_path), [], machines=3, segments=SEGMENTS)
    status = shown(tmp_path, capsys, code=1)
    assert (status["phase"], status["iteration"]) == ("unknown", 16)
    assert "is not archived" in status["problems"][0]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "holds no run of swift_ft"),
        ('{"run_id": "job.1-0a', "is damaged"),
        (json.dumps(sealed(NEWER)), "A newer version of swift_ft wrote"),
        (json.dumps(NEWER), "is damaged"),
        ('{"name": "of another tool"}', "its run.json is something else"),
    ],
)
def test_a_store_that_cannot_be_used(
    tmp_path: Path, record: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ("run.json" if record else "notes.txt")).write_text(record or "mine")
    before = sorted(tmp_path.iterdir())
    assert main(["status", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("url", ["/nowhere/store", "nosuch://bucket/store", "s3://user:secret@bucket/x"])
def test_a_url_that_cannot_be_read(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("swift_ft.offline.run_store._PATIENCE_S", 0.0)
    assert main(["status", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-recover: ")
    assert "secret" not in line
