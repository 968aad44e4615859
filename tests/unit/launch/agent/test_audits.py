"""Audits by an agent: what one has left whose agent was killed, and a store that it cannot open."""

from __future__ import annotations

import json
import os
import selectors
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.launch.agent.audits import Auditor, locked_folder, sweep_left
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.storage.store_url import StoreUrl
from swift_ft.testing.scenario import Scenario


def test_only_what_nobody_holds_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (left, gone), (held, lock) = locked_folder(), locked_folder()
    os.close(gone)  # as when its agent is killed
    other = tmp_path / "swift-other"
    for folder in (left, held, other):
        (folder / "out").mkdir(parents=True)
        (folder / "out" / "state").touch()
    sweep_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([held.name, other.name])
    assert (held / "out" / "state").exists()
    os.close(lock)
    sweep_left(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


SPARE = """
open 2
join A B
join S
report all nothing
committed 0 keep=2
committed 20 keep=2
expect audit S 0 0..20
"""


def membership(url: str) -> JournalRendezvous:
    """A spare's, in a job whose session uses this store. It has no journal: to use it fails."""
    parsed = StoreUrl.parse(url)
    facts = json.dumps({"store": str(parsed), "secret": parsed.has_credentials})
    made: Any = JournalRendezvous.__new__(JournalRendezvous)
    made.store = SimpleNamespace(check=lambda keys: True, get=lambda key: facts)
    made.machine = "S"
    return cast("JournalRendezvous", made)


def test_a_store_that_only_the_script_can_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and no audit is begun that could not end."""
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(SPARE)
    scenario.run(path)
    settings: Any = SimpleNamespace(config=RunConfig(audit=True), kind="script")
    for_standby: Any = None
    with selectors.DefaultSelector() as selector:
        auditor = Auditor(settings, for_standby, membership("sftp://me:word@host/run"), selector)
        auditor.look(scenario.state)
        auditor.look(scenario.state)
        other = Auditor(settings, for_standby, membership("sftp://host/run"), selector)
        with pytest.raises(AttributeError):  # it has something to audit, and no journal
            other.look(scenario.state)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the URL of sftp://host/run has credentials in it" in line
    assert "word" not in line
