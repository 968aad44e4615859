"""The folder of one run: its script's, but for one folder in it that is the trial's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "{folder}"
"""Stands for a folder of each run's own in a script's arguments."""
OWN = "swift-chaos"
"""The folder of a trial's own in a run's folder. No script would name one so: all else is compared."""
_RECORD = "run.json"


def new_own(folder: Path) -> Path:
    """The trial's own folder in a run's, which is there now."""
    own = folder / OWN
    own.mkdir(exist_ok=True)
    return own


def output_of(folder: Path) -> Path:
    """All that the launcher of a run has printed."""
    return folder / OWN / "output.log"


def report_of(folder: Path) -> Path:
    """The events and recoveries of a run (``--events-out``)."""
    return folder / OWN / "events.json"


def read_report(folder: Path) -> dict[str, Any]:
    """The same, read; empty if the launcher has written none."""
    try:
        found: dict[str, Any] = json.loads(report_of(folder).read_text())
    except OSError:
        return {}
    return found


def logs_of(folder: Path) -> Path:
    """The folder of what its processes have logged (``--log-dir``)."""
    return folder / OWN / "logs"


def is_at_home(script: tuple[str, ...]) -> bool:
    """Whether a script's arguments say where it keeps its files: else that is its working directory."""
    return any(FOLDER in argument for argument in script)


def is_module(script: tuple[str, ...]) -> bool:
    """Whether it is a module, by its name."""
    return script[:1] == ("-m",)


def working_directory(script: tuple[str, ...], folder: Path) -> Path | None:
    """The folder that a script runs in: its run's own, or None for that of this tool."""
    return None if is_at_home(script) else folder


def search_path(script: tuple[str, ...]) -> dict[str, str]:
    """The variables by which Python finds a module from where this tool runs, wherever the module runs."""
    if not is_module(script):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))}


def store_in(folder: Path) -> str | None:
    """The session's store in a run's folder; None without one."""
    found = sorted(path.parent for path in folder.rglob(_RECORD) if (path.parent / "checkpoints").is_dir())
    return str(found[0]) if found else None
