"""An audit of stages: what a replay has found, of which machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NoReturn

import pytest

from swift_ft.config.audit import AuditRequest
from swift_ft.errors import RecoveryError
from swift_ft.logging import Direction, MessageKey
from swift_ft.offline import audit as audits
from swift_ft.offline.replay import ReplayRequest
from swift_ft.runtime.offline_replay import note_difference
from tests.support.stored_run import make_run
from tests.unit.offline.test_gradient_audit import REQUEST as OF_REPLICAS

KEY = MessageKey(25, 0, Direction.FORWARD, 1, 2, 0)


@pytest.fixture
def asked(tmp_path: Path) -> AuditRequest:
    (tmp_path / "out").mkdir()
    return dataclasses.replace(OF_REPLICAS, gradients=False, out=str(tmp_path / "out"))


@pytest.mark.parametrize(("computed", "digest"), [(77, "77"), (None, "")])
def test_a_difference_says_which_machines_were_rebuilt(
    computed: int | None, digest: str, asked: AuditRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them may be wrong. Without a digest no two of these agree."""

    def differs(replay: ReplayRequest) -> NoReturn:
        assert replay.limit_s == asked.limit_s
        note_difference(replay.out, 2, KEY, computed, sender=2, changed=False)
        raise RecoveryError("worker 2: the replay diverged", machines=(0, 2))

    monkeypatch.setattr(audits, "replay_machine", differs)
    found = audits.audit(asked)
    assert (found.slots, found.rank, found.iteration, found.digest) == ((0, 2), 2, 25, digest)


@pytest.mark.parametrize(
    ("begin", "until", "why"),
    [
        (6, 9, "its log ends with iteration 8, and the next checkpoint is of 9"),
        (4, 6, "the checkpoint of iteration 4 is gone"),
    ],
)
def test_a_reason_names_no_option_that_nobody_gave(
    begin: int, until: int, why: str, asked: AuditRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    make_run(tmp_path / "store", script)
    monkeypatch.setattr(audits, "_PATIENCE_S", 0.0)
    request = dataclasses.replace(
        asked, store=str(tmp_path / "store"), target=str(script), begin=begin, until=until
    )
    problem = audits.audit(request).problem
    assert why in problem
    assert "--" not in problem


def test_a_replay_that_fails_without_a_difference_is_a_problem(
    asked: AuditRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(replay: ReplayRequest) -> NoReturn:
        raise RecoveryError("no iteration has ended within 60 s", machines=(0, 2))

    monkeypatch.setattr(audits, "replay_machine", fails)
    found = audits.audit(asked)
    assert (found.slots, found.problem) == ((), "no iteration has ended within 60 s")
