"""What an audit has left whose agent was killed is deleted by the next one, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_ft.launch.agent.audits import locked_folder, sweep_left


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
