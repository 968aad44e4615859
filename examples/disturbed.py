"""The same failure under swift-run, with a replay, and under torchrun, with a DCP checkpoint.

A machine gets SIGKILL in the middle of an iteration's forward. The times are read from outside: for swift-run
from its journal and the workers' progress, for torchrun from the trace of ``train_plain.py``.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.commands import EXAMPLES, CommandError, check, finished, started, swift_run, torchrun
from swift_ft.cli.watch import Progress, View, Watch
from swift_ft.store_address import StoreAddress

Show = Callable[[Watch, Callable[[], bool]], None]
"""Polls the watch, and may show the run, until the run ends."""
ProgressLog = list[tuple[int, Progress]]
"""The progress that each rank reported, in order of time."""


@dataclass(frozen=True)
class Failure:
    """What is trained, and when a machine dies.

    Attributes:
        kill_iteration: in whose forward the machine dies.
        checkpoint_every: iterations between two checkpoints.
        machine: the one that dies.
        machines: how many there are, with one worker each.
        options: further options of the example scripts (the model's size).
        script: what swift-run trains with.
        flags: further options of swift-run.
    """

    kill_iteration: int = 47
    checkpoint_every: int = 20
    machine: int = 1
    machines: int = 4
    options: tuple[str, ...] = ()
    script: Path = EXAMPLES / "train_swift.py"
    flags: tuple[str, ...] = ()

    @property
    def distance(self) -> int:
        """Completed iterations since the last checkpoint."""
        return self.kill_iteration % self.checkpoint_every

    @property
    def fault(self) -> str:
        """For ``swift-run --inject``."""
        return f"kill machine={self.machine} iteration={self.kill_iteration} point=forward microbatch=3"


# ------------------------------------------------------------------------------------------------- swift_ft


@dataclass
class SwiftOutcome:
    """How a run under swift-run went. Times are Unix seconds.

    Attributes:
        recoveries: as ``swift-run --events-out`` writes them.
        killed: when the machine got SIGKILL.
        loaded: when the replacement had its checkpoint and began to replay.
        live: when the last worker began the interrupted iteration again.
        done: when the last worker had completed it.
        bytes_logged: by rank, as each worker reported at its end.
        iteration_s: mean time of an iteration before the kill, without the first one.
        progress: what the workers reported, by rank.
    """

    recoveries: list[dict[str, Any]]
    killed: float | None = None
    loaded: float | None = None
    live: float | None = None
    done: float | None = None
    bytes_logged: dict[int, int] = field(default_factory=dict)
    iteration_s: float | None = None
    progress: ProgressLog = field(default_factory=list)

    @property
    def replayed(self) -> bool:
        """Whether there was exactly one recovery, a replay, and it ended."""
        ways = [(r["mode"], r["live"] is not None) for r in self.recoveries]
        return ways == [("replay", True)] and None not in (self.killed, self.loaded, self.live, self.done)

    def timeline(self) -> dict[str, float]:
        """The steps of the recovery, in seconds after the kill."""
        if not self.replayed or self.killed is None:
            return {}
        recovery = self.recoveries[0]
        times = {
            "detected": recovery["detected"],
            "joined": recovery["joined"],
            "reported": recovery["reported"],
            "loaded": self.loaded,
            "replayed": recovery["replayed"],
            "live": self.live,
            "done": self.done,
        }
        return {name: at - self.killed for name, at in times.items() if at is not None}


def swift(
    failure: Failure,
    iterations: int,
    folder: Path,
    *,
    kill: bool = True,
    show: Show | None = None,
    env: Mapping[str, str] | None = None,
) -> SwiftOutcome:
    """Trains under swift-run, with the failure or without it; final weights are in ``folder/weights``.

    See :func:`train`.

    Raises:
        CommandError: if the run does not end well.
    """
    inject = failure.fault if kill else ""
    report, progress = train(failure, iterations, folder, inject=inject, show=show, env=env)
    return _outcome(failure, report, progress)


def train(
    failure: Failure,
    iterations: int,
    folder: Path,
    *,
    inject: str,
    show: Show | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], ProgressLog]:
    """Trains under swift-run with any faults; returns what ``--events-out`` wrote, and the workers' progress.

    Args:
        failure: what is trained, and with which script.
        iterations: how many there are.
        folder: for everything that the run writes; it must not exist.
        inject: faults, as for ``swift-run --inject``.
        show: polls the watch, and may show the run.
        env: variables to add to the workers' environment.

    Raises:
        CommandError: if the run does not end well.
    """
    folder.mkdir(parents=True)
    endpoint, events, output = folder / "endpoint.txt", folder / "events.json", folder / "output.txt"
    command = swift_run(
        *("--machines", str(failure.machines), "--spares", "1", "--log-dir", str(folder / "logs")),
        *("--events-out", str(events), "--endpoint-out", str(endpoint)),
        *(("--inject", inject) if inject else ()),
        *failure.flags,
        str(failure.script),
        *("--iterations", str(iterations)),
        *("--checkpoint-every", str(failure.checkpoint_every), "--store", str(folder / "store")),
        *("--weights-out", str(folder / "weights"), *failure.options),
    )
    progress: ProgressLog = []
    with started(command, output, **(env or {})) as process:
        if (address := _endpoint(endpoint, process)) is not None:
            watch = Watch(*address, View(iterations), lambda rank, p: progress.append((rank, p)))
            (show or _poll)(watch, lambda: process.poll() is None)
        process.wait()
    check(process, output)
    return json.loads(events.read_text()), progress


def _endpoint(file: Path, process: subprocess.Popen[bytes]) -> tuple[StoreAddress, str] | None:
    while process.poll() is None:
        if file.exists() and (text := file.read_text()).endswith("\n"):
            endpoint, run_id = text.split()
            return StoreAddress.parse(endpoint), run_id
        time.sleep(0.05)
    return None


def _poll(watch: Watch, running: Callable[[], bool]) -> None:
    while running():
        watch.poll()
        time.sleep(0.01)


def _outcome(failure: Failure, report: dict[str, Any], progress: ProgressLog) -> SwiftOutcome:
    outcome = SwiftOutcome(report["recoveries"], progress=progress)
    outcome.bytes_logged = {rank: p.bytes_logged for rank, p in progress if p.bytes_logged is not None}
    faults = [entry["at"] for entry in report["events"] if entry["event"] == "FaultInjected"]
    if not faults or not outcome.recoveries or outcome.recoveries[0]["replayed"] is None:
        return outcome
    outcome.killed = faults[0]
    after = [(rank, p) for rank, p in progress if p.at > outcome.recoveries[0]["detected"]]
    outcome.loaded = min((p.at for rank, p in after if p.mode == "replay"), default=None)
    ranks = range(failure.machines)
    interrupted = failure.kill_iteration
    begins = [
        _first(p.at for rank, p in progress if rank == 0 and p.mode == "live" and p.iteration == i)
        for i in (1, interrupted)
    ]
    if begins[0] is not None and begins[1] is not None:
        outcome.iteration_s = (begins[1] - begins[0]) / (interrupted - 1)
    outcome.live = _last(
        _first(p.at for r, p in after if r == rank and p.mode == "live" and p.iteration >= interrupted)
        for rank in ranks
    )
    outcome.done = _last(
        _first(p.at for r, p in after if r == rank and p.iteration > interrupted) for rank in ranks
    )
    return outcome


def _first(times: Iterable[float]) -> float | None:
    return min(times, default=None)


def _last(times: Iterable[float | None]) -> float | None:
    """The last of all ranks' times; None if one of them has none."""
    known = list(times)
    return None if None in known else max(at for at in known if at is not None)


# ------------------------------------------------------------------------------------------------- torchrun


@dataclass
class TorchrunOutcome:
    """How a run under torchrun recovered. Times are Unix seconds, each that of the last worker.

    Attributes:
        killed: when the worker got SIGKILL.
        restarted: when all processes were started again.
        joined: when they had formed their group.
        loaded: when the checkpoint was loaded.
        back: when the interrupted iteration began again.
        done: when it was completed.
        iterations_lost: completed iterations that all workers had to repeat.
        before: when iterations ended before the kill, from the first one on.
        after: when they ended afterwards, from the first that was repeated on.
    """

    killed: float
    restarted: float
    joined: float
    loaded: float
    back: float
    done: float
    iterations_lost: int
    before: list[float]
    after: list[float]

    def timeline(self) -> dict[str, float]:
        """The steps of the recovery, in seconds after the kill."""
        names = ("restarted", "joined", "loaded", "back", "done")
        return {name: getattr(self, name) - self.killed for name in names}


def plain(failure: Failure, folder: Path) -> TorchrunOutcome:
    """Trains under torchrun until a few iterations after the failure.

    Raises:
        CommandError: if the run does not end well, or was not interrupted.
    """
    folder.mkdir(parents=True)
    output, trace = folder / "output.txt", folder / "trace.jsonl"
    command = torchrun(
        *("--nproc-per-node", str(failure.machines), "--max-restarts", "3"),
        *(str(EXAMPLES / "train_plain.py"), "--iterations", str(failure.kill_iteration + 3)),
        *("--checkpoint-every", str(failure.checkpoint_every), "--checkpoint-dir", str(folder / "store")),
        *("--kill-rank", str(failure.machine), "--kill-iteration", str(failure.kill_iteration)),
        *("--kill-marker", str(folder / "killed"), "--trace", str(trace), *failure.options),
    )
    # Without the first variable, restarts of four processes hang now and then.
    finished(command, output, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1")
    return _read_trace(failure, [json.loads(line) for line in trace.read_text().splitlines()])


def _read_trace(failure: Failure, lines: list[dict[str, Any]]) -> TorchrunOutcome:
    killed = next((line["at"] for line in lines if line["event"] == "kill"), None)
    if killed is None:
        raise CommandError("torchrun's training was not interrupted")
    after = [line for line in lines if line["at"] > killed]

    def last(event: str, iteration: int | None) -> float:
        times: list[float] = [
            line["at"] for line in after if (line["event"], line["iteration"]) == (event, iteration)
        ]
        if len(times) < failure.machines:
            raise CommandError(f"torchrun's training did not reach {event} {iteration} again")
        return max(times)

    first = next(line["iteration"] for line in after if line["event"] == "loaded")
    interrupted = failure.kill_iteration
    return TorchrunOutcome(
        killed=killed,
        restarted=last("start", None),
        joined=last("joined", None),
        loaded=last("loaded", first),
        back=last("finished", interrupted - 1) if first < interrupted else last("loaded", first),
        done=last("finished", interrupted),
        iterations_lost=interrupted - first,
        before=[
            max(line["at"] for line in lines if line["at"] < killed and _is_end(line, iteration))
            for iteration in range(interrupted)
        ],
        after=[last("finished", iteration) for iteration in range(first, interrupted + 1)],
    )


def _is_end(line: dict[str, Any], iteration: int) -> bool:
    return (line["event"], line["iteration"]) == ("finished", iteration)
