"""Modules that a machine imports before it forks its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.launch.processes.preload import preload
from swift_ft.launch.processes.standby import Standby

MODULES = {
    "fine": "VALUE = 1",
    "wrong": "raise KeyError('setting')",
    "leaves": "raise SystemExit(3)",
    "threaded": "import threading as t; t.Thread(target=t.Event().wait, name='pump', daemon=True).start()",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Python finds the modules."""
    for name, text in MODULES.items():
        (tmp_path / f"swift_test_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_is_imported(folder: Path) -> None:
    """Here in a process of its own, for good."""
    script = (
        "import sys; from swift_ft.launch.processes.preload import preload; preload(['swift_test_fine']); "
        "print(sys.modules['swift_test_fine'].VALUE)"
    )
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("swift_test_missing", r"cannot be imported \(ModuleNotFoundError: No module named"),
        ("swift_test_wrong", r"cannot be imported \(KeyError: 'setting'\)"),
        ("swift_test_leaves", r"cannot be imported \(SystemExit: 3\)"),
        ("swift_test_threaded", r"starts a thread \(pump\)"),
    ],
)
def test_a_module_is_refused_that_workers_could_not_have(module: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"^--preload {module}: its? .*{reason}.*leave it out.$"):
        preload([module])


@pytest.mark.usefixtures("folder")
def test_a_module_is_refused_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="uses CUDA"):
        preload(["swift_test_fine"])
    preload()  # what is always imported uses none


@pytest.mark.usefixtures("folder")
def test_an_agent_learns_that_its_standby_refused() -> None:
    standby = Standby(["swift_test_wrong"])
    try:
        with pytest.raises(UsageError, match="KeyError: 'setting'"):
            standby.receive()
    finally:
        standby.close()
