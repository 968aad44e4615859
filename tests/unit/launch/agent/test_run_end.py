"""What an agent still does for the session's store when the run is over, also where that store hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from immutables import Map

from swift_ft.launch.agent import run_end
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.logging.writing.uploader import Spool
from swift_ft.recovery.job_state import JobShape, Phase, State, Verdict
from swift_ft.recovery.membership import Membership


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
