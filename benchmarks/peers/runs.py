"""One run of two DDP workers with one kind of protection, and the times in its trace."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.commands import CommandError, check, started, swift_run, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
TORCHFT_VERSION = "0.2.0"
_AFTER = 3  # iterations of the replacement that a run waits for
_STARTED_S = 15.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Setting:
    """What is trained, and when a worker dies.

    Attributes:
        kill_iteration: in whose backward worker 1 dies.
        checkpoint_every: iterations between two DCP checkpoints.
        lost: completed iterations since the last one.
        options: the model's size.
        warm_up: first steps that are not timed.
        deadline_s: for one run.
    """

    kill_iteration: int
    checkpoint_every: int
    lost: int
    options: tuple[str, ...]
    warm_up: int
    deadline_s: float


@dataclass(frozen=True)
class Contender:
    """One kind of protection for the training.

    Attributes:
        name: in tables.
        kind: which launcher and script.
        kill: whether a worker dies; without, the training ends where it would.
    """

    name: str
    kind: str
    kill: bool = True


PLAIN = Contender("plain DDP", "plain", kill=False)
OURS = Contender("swift_ft", "ours")
DCP = Contender("torchrun + DCP", "dcp")


def why_no_torchft() -> str | None:
    """Why torchft cannot be measured; None if it can."""
    try:
        found = importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return f"it is not installed: pip install torchft=={TORCHFT_VERSION}"
    if found != TORCHFT_VERSION:
        return f"version {found} is installed, but this benchmark is for {TORCHFT_VERSION}"
    return None


# ---------------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True)
class Process:
    """The events of one process, in order."""

    rank: int
    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """All events of a kind."""
        return [line for line in self.events if line["event"] == event]

    @property
    def started(self) -> float:
        """Unix time."""
        return float(self.of("start")[0]["at"])


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        step_s: failure-free step times of worker 0, while both workers live.
        after_kill: seconds after the kill, by name.
    """

    step_s: list[float]
    after_kill: dict[str, float] = field(default_factory=dict)

    @property
    def recovery_s(self) -> float | None:
        """The paper's recovery time: from the replacement's joining to the iteration of the failure."""
        times = self.after_kill
        return times["back"] - times["joined"] if "back" in times else None


def read(folder: Path) -> list[Process]:
    """All processes of a run, as they started."""
    found = []
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        found.append(Process(int(path.name.partition("-")[0]), events))
    return sorted((process for process in found if process.events), key=lambda process: process.started)


def _evaluate(contender: Contender, setting: Setting, processes: Sequence[Process]) -> Outcome:
    first = next(process for process in processes if process.rank == 0)
    kills = [event["at"] for process in processes for event in process.of("kill")]
    end = kills[0] if kills else float("inf")
    steps = [event for event in first.of("end") if event["at"] < end]
    pairs = [(a, b) for a, b in pairwise(steps) if b["iteration"] == a["iteration"] + 1][setting.warm_up :]
    if not pairs:
        raise CommandError(f"{contender.name}: no steps to time")
    step_s = [b["at"] - a["at"] for a, b in pairs]
    if not contender.kill:
        return Outcome(step_s)
    if not kills:
        raise CommandError(f"{contender.name}: no worker was killed")
    return Outcome(step_s, _recovery(contender, setting, processes, kills[0]))


def _recovery(
    contender: Contender, setting: Setting, processes: Sequence[Process], killed: float
) -> dict[str, float]:
    """Seconds after the kill."""
    interrupted = setting.kill_iteration
    after = [(p, event) for p in processes for event in p.events if event["at"] > killed]

    def first(event: str, rank: int, since: int = 0) -> float:
        """When a worker first wrote this event, in this iteration or a later one."""
        times = [
            line["at"]
            for process, line in after
            if (process.rank, line["event"]) == (rank, event) and line.get("iteration", 0) >= since
        ]
        if not times:
            raise CommandError(f"{contender.name}: worker {rank} wrote no {event!r} after the kill")
        return float(min(times))

    if not any(line["event"] == "joined" for _, line in after):
        raise CommandError(f"{contender.name}: no worker joined after the kill")
    times = {
        "joined": max(line["at"] for _, line in after if line["event"] == "joined"),
        "survivor": first("end", 0, interrupted),
        "replacement": first("end", 1),
        "back": max(first("begin", rank, interrupted) for rank in (0, 1)),
    }
    return {name: at - killed for name, at in times.items()}


# ---------------------------------------------------------------------------------------------------- runs


def run(contender: Contender, setting: Setting, folder: Path) -> Outcome:
    """Trains with one contender.

    Raises:
        CommandError: if a command fails, or the run takes too long.
    """
    trace = folder / "trace"
    trace.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        process, output = _start(contender, setting, folder, trace, stack)
        try:
            process.wait(setting.deadline_s)
        except subprocess.TimeoutExpired:
            said = output.read_text(errors="replace")[-1500:]
            late = f"{contender.name} was not done after {setting.deadline_s:.0f} s"
            raise CommandError(f"{late}\n{said}") from None
        check(process, output)
    return _evaluate(contender, setting, read(trace))


def _start(
    contender: Contender, setting: Setting, folder: Path, trace: Path, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], Path]:
    """The command, and the file for its output."""
    common = ["--trace", str(trace), *setting.options]
    common += ["--iterations", str(setting.kill_iteration + _AFTER + 1)]
    if contender.kill:
        common += ["--kill-iteration", str(setting.kill_iteration)]
    # Without the second variable, torchrun's restarts hang now and then.
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = (
        _ours(folder, common) if contender.kind == "ours" else _plain(contender, setting, folder, common)
    )
    output = folder / "output.txt"
    return stack.enter_context(started(command, output, **env)), output


def _ours(folder: Path, common: Sequence[str]) -> list[str]:
    script = (str(SCRIPTS / "ours.py"), "--store", str(folder / "store"), *common)
    return swift_run("--machines", "2", "--spares", "1", "--log-dir", str(folder / "logs"), *script)


def _plain(contender: Contender, setting: Setting, folder: Path, common: Sequence[str]) -> list[str]:
    script = [str(SCRIPTS / "plain.py"), *common]
    if contender.kind == "dcp":
        every = setting.checkpoint_every
        first = (setting.kill_iteration - setting.lost) % every or every
        script += ["--checkpoints", str(folder / "checkpoints")]
        script += ["--checkpoint-every", str(every), "--checkpoint-first", str(first)]
    return torchrun("--nproc-per-node", "2", "--max-restarts", "3", *script)


@contextlib.contextmanager
def lighthouse(timeout_s: float | None, folder: Path) -> Iterator[str]:
    """Runs torchft's lighthouse with its defaults, or with our timeouts. Yields its address."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).parent / "torchft_lighthouse"
    command = [str(program), "--bind", f"[::]:{port}", "--min_replicas", "1"]
    if timeout_s is not None:
        milliseconds = str(round(1000 * timeout_s))
        command += ["--heartbeat_timeout_ms", milliseconds, "--join_timeout_ms", milliseconds]
    output = folder / "lighthouse.txt"
    with started(command, output) as process:
        deadline = time.monotonic() + _STARTED_S
        while not _listens(port):
            check(process, output)
            if time.monotonic() > deadline:
                raise CommandError(f"torchft's lighthouse does not listen\n{output.read_text()[-500:]}")
            time.sleep(_POLL_S)
        yield f"http://localhost:{port}"


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False
