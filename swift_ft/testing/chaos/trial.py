"""One run of a real training under swift-run, disturbed or not, and how it ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_payload import unpack
from swift_ft.faults import Fault
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.habits import Habit

_GRACE_S = 20.0
_MARK = "SWIFT_CHAOS_FOLDER"
_REPORT = "events.json"
_PLANTED = str(Path(__file__).with_name("planted.py"))


class Outcome(StrEnum):
    """The outcome of a disturbed run, in comparison with the undisturbed one."""

    IDENTICAL = "identical"
    """Its last checkpoint is that of the undisturbed run, bit for bit."""
    NOT_STRUCK = "not struck"
    """None of its faults struck: it shows nothing."""
    ENDED = "ended"
    """It ended with an error in one line. Nothing is silently wrong."""
    WRONG = "WRONG"
    """It ended well, with another state."""
    HUNG = "HUNG"
    """It did not end in time."""
    CRASHED = "CRASHED"
    """It ended with a traceback of swift_ft's own or without saying why, or left processes behind."""


@dataclass(frozen=True, slots=True)
class Training:
    """The training that all trials run.

    Attributes:
        launch: flags of swift-run.
        script: the script and its arguments; ``{folder}`` stands for a folder of each run's own.
        store: the run's store, with ``{folder}``.
        deadline_s: seconds after which a run counts as hung.
        habits: that are planted into the script.
    """

    launch: tuple[str, ...]
    script: tuple[str, ...]
    store: str
    deadline_s: float
    habits: tuple[Habit, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The script with its habits, and its arguments."""
        return (_PLANTED, ",".join(self.habits), *self.script) if self.habits else self.script


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        plan: the faults, as ``--inject`` reads them.
        outcome: how it ended.
        code: exit code; None if it hung.
        reason: the line with which it ended; empty if it ended well.
        missed: faults that never struck; known only of a run that ended well.
        state: digest of each value in the last checkpoint, by worker and name.
        folder: where its output is.
    """

    plan: str
    outcome: Outcome
    code: int | None
    reason: str
    state: dict[str, str]
    folder: Path
    habits: tuple[Habit, ...] = ()
    missed: tuple[str, ...] = ()


def run_trial(
    training: Training, folder: Path, plan: Sequence[Fault] = (), expected: dict[str, str] | None = None
) -> Trial:
    """Run the training once, and compare it.

    Args:
        training: what.
        folder: an empty folder of this run's own.
        plan: the faults.
        expected: the digests of the undisturbed run; None if this is that one.
    """
    text = "; ".join(map(str, plan))
    code, output = _run(training, folder, text)
    left = _kill_processes_of(folder)
    (folder / "output.log").write_text(output)
    report = _report(folder)
    missed = tuple(report.get("missed_faults", ()))
    if code == 1 and report.get("ok") and missed:  # all went well but for these faults
        code = 0
    reason = _reason(output) if code else ""
    state = last_state(training.store.replace("{folder}", str(folder))) if code == 0 else {}
    if code is None:
        outcome = Outcome.HUNG
    elif left:
        outcome, reason = Outcome.CRASHED, f"{left} processes were left behind"
    elif code != 0:
        outcome = Outcome.ENDED if reason else Outcome.CRASHED
    else:
        same = expected is None or state == expected
        outcome = Outcome.IDENTICAL if same and state else Outcome.WRONG
        if outcome == Outcome.IDENTICAL and plan and len(missed) == len(plan):
            outcome = Outcome.NOT_STRUCK
    return Trial(text, outcome, code, reason, state, folder, training.habits, missed)


def _report(folder: Path) -> dict[str, Any]:
    """The report that the launcher wrote; empty if it did not."""
    try:
        found: dict[str, Any] = json.loads((folder / _REPORT).read_text())
    except OSError:
        return {}
    return found


def _run(training: Training, folder: Path, inject: str) -> tuple[int | None, str]:
    launcher = [sys.executable, "-m", "swift_ft.cli.run", *training.launch]
    launcher += ["--log-dir", str(folder / "logs"), "--events-out", str(folder / _REPORT)]
    launcher += ["--inject", inject]
    script = [argument.replace("{folder}", str(folder)) for argument in training.command]
    environment = {**os.environ, _MARK: str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "console").open("w+", errors="replace") as console:
        process = subprocess.Popen(
            [*launcher, *script],
            stdout=console,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(training.deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(_GRACE_S)
        console.seek(0)
        return code, console.read()


def _reason(output: str) -> str:
    """The last line of the launcher itself; empty if it says nothing, or only with a traceback."""
    lines = [line for line in output.splitlines() if line]
    own = [line for line in lines if line.startswith("swift-run: ")]
    own_traceback = any(line.startswith("Traceback ") for line in lines)  # a worker's has a prefix
    return own[-1] if own and not own_traceback else ""


def _kill_processes_of(folder: Path) -> int:
    """Kill what a run has left behind, and return how many processes that were."""
    mark = f"{_MARK}={folder}\0".encode()
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found += 1
                os.kill(int(entry.name), signal.SIGKILL)
    return found


def last_state(url: str) -> dict[str, str]:
    """A digest of each value in the last checkpoint of a store, by rank and name. Empty without a checkpoint.

    The random state of the process is left out: a script need not seed what it does not use, and steps have
    random state of their own.
    """
    folder = CheckpointFolder(Store(url))
    if not (committed := folder.committed()):
        return {}
    found = {"iteration": str(committed[-1])}
    for rank, part in sorted(folder.parts_of(committed[-1]).items()):
        state = folder.reader(part).read()
        for name, value in _leaves(state):
            found[f"worker {rank}{name}"] = xxhash.xxh3_128_hexdigest(_bytes_of(value))
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, io.BytesIO):
        plain = unpack(value.getvalue())
        plain["small"].pop("random", None)
        yield from _leaves(plain, name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, Sequence | deque) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return bytes(value.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    shown = sorted(map(repr, value)) if isinstance(value, set | frozenset) else value  # a set has no order
    return repr(shown).encode()
