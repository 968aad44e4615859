"""What an agent still does for the session's store when the run is over, also where that store hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from immutables import Map

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import write_record
from swift_ft.launch.agent import run_end
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.logging.writing.uploader import Spool
from swift_ft.recovery.job_state import Checkpoints, Doubt, JobShape, Phase, State, Verdict
from swift_ft.recovery.membership import Membership
from swift_ft.storage.store import Store


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done in the store, in order."""
    acts: list[str] = []
    monkeypatch.setattr(RunEnd, "_write_tail", lambda self, store: acts.append("archived"))
    monkeypatch.setattr(RunEnd, "_sweep_drafts", lambda self, *_: acts.append("swept"))
    return acts


def an_end(ok: bool) -> State:
    membership = Membership(members=Map({0: "m-1"}))
    shape, verdict = JobShape(machines=1), Verdict(ok, "why")
    return State(shape=shape, membership=membership, phase=Phase.ENDED, verdict=verdict)


@pytest.mark.parametrize("ok", [True, False])
def test_the_end_is_archived_before_all_else(
    ok: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def store(url: str, run: str, patience_s: float) -> str:
        patience.append(patience_s)
        return url

    monkeypatch.setattr(run_end, "store_of_run", store)
    end = RunEnd("run")
    end.hear({"store": "memory://here"})
    end.tidy(an_end(ok), 0, 60.0)
    assert done == ["archived", *["swept"] * (not ok)]
    assert max(patience) < 60.0, "there is time left to say that the store is away"


@pytest.mark.parametrize("act", ["tidy", "archive"])
def test_a_store_that_hangs_is_told(
    act: str, done: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(run_end, "store_of_run", lambda *_: answers.wait())
    end = RunEnd("run")
    end.hear({"store": "memory://here"})
    acts: dict[str, Callable[[], None]] = {
        "tidy": lambda: end.tidy(an_end(True), 0, 0.01),
        "archive": lambda: end.archive(0.01),
    }
    acts[act]()
    answers.set()
    assert not done
    assert [record.event for record in caplog.records] == ["archive_failed"]  # type: ignore[attr-defined]  # ours


def test_logs_of_killed_workers_leave_the_local_disk_with_the_agent(tmp_path: Path) -> None:
    """No other worker may ever keep its log on this machine."""
    living = Spool(tmp_path)
    killed = tmp_path / "swift-ft-spool-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (killed / "segment").write_bytes(b"x")
    end = RunEnd("run")
    end.hear({"spools": str(tmp_path)})
    end.sweep_spools(60.0)
    assert list(tmp_path.iterdir()) == [living.path]
    living.close()


def test_a_local_disk_that_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(run_end, "sweep_spools", lambda place: answers.wait())
    end = RunEnd("run")
    end.sweep_spools(0.0)  # no worker has kept anything there
    assert not caplog.records
    end.hear({"spools": str(tmp_path)})
    end.sweep_spools(0.01)
    answers.set()
    assert "could not be removed from the local disk within 0.01 s" in caplog.text


@pytest.mark.parametrize("slot", [None, 0, 3])
def test_what_may_be_wrong_is_nothing_to_resume_from(
    slot: int | None, done: list[str], tmp_path: Path
) -> None:
    """Worker 0 takes the markers back while it lives: its script has ended."""
    store = Store(str(tmp_path))
    write_record(store, {"run_id": "run", "topology": {}, "earlier": []})
    folder = CheckpointFolder(store)
    for iteration, generation in ((20, 1), (40, 1), (50, 2)):
        folder.commit(iteration, {0: folder.part(iteration, 0, generation)}, "run", {})
    members = Membership(members=Map({slot: f"m-{slot}" for slot in range(4)}))
    state = replace(an_end(ok=False), membership=members, checkpoints=Checkpoints(doubts=(Doubt(20, 1),)))
    end = RunEnd("run")
    end.hear({"store": store.url})
    end.tidy(state, slot, 60.0)
    assert folder.committed() == ([20, 40, 50] if slot == 3 else [20, 50]), "a few machines do it"


def test_what_may_be_wrong_and_stays_is_said(
    done: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise OSError("down")

    monkeypatch.setattr(run_end, "store_of_run", away)
    end = RunEnd("run")
    end.hear({"store": "memory://here"})
    end.tidy(replace(an_end(ok=True), checkpoints=Checkpoints(doubts=(Doubt(20, 1),))), 0, 60.0)
    assert (
        "Checkpoints that may be wrong are still in the store: do not --resume this run: down" in caplog.text
    )
