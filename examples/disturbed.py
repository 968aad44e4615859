"""The same failure under swift-run, with a replay, and under torchrun, with a DCP checkpoint.

A machine gets SIGKILL in the middle of an iteration's forward. The times are what processes recorded: for
swift-run the recovery's trace in its report, the work of each worker in the store and the killed one's last
line, for torchrun the trace of ``train_plain.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.commands import EXAMPLES, CommandError, check, finished, started, swift_run, torchrun
from swift_ft.checkpoint.run_record import RECORD
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_history import HISTORIES, GenerationWork, WorkerHistory
from swift_ft.cli.watch import View, Watch
from swift_ft.config.store_address import StoreAddress
from swift_ft.observe.spans import FIRST_ITERATION
from swift_ft.storage.store import Store

Show = Callable[[Watch, Callable[[], bool]], None]
"""Polls the watch, and may show the run, until the run ends."""
Works = tuple[GenerationWork, ...]

_STRIKES = re.compile(r"fault strikes at Unix time (\d+\.\d+)")


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
        bytes_logged: by rank, by the process that was its last.
        iteration_s: mean time of worker 0's iterations before the kill.
    """

    recoveries: list[dict[str, Any]]
    killed: float | None = None
    loaded: float | None = None
    live: float | None = None
    done: float | None = None
    bytes_logged: dict[int, int] = field(default_factory=dict)
    iteration_s: float | None = None

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
    report = train(failure, iterations, folder, inject=inject, show=show, env=env)
    return _outcome(failure, report, folder)


def train(
    failure: Failure,
    iterations: int,
    folder: Path,
    *,
    inject: str,
    show: Show | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Trains under swift-run with any faults; returns what ``--events-out`` wrote.

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
    with started(command, output, **(env or {})) as process:
        if show is not None and (address := _endpoint(endpoint, process)) is not None:
            show(Watch(*address, View(iterations)), lambda: process.poll() is None)
        process.wait()
    check(process, output)
    found: dict[str, Any] = json.loads(events.read_text())
    return found


def _endpoint(file: Path, process: subprocess.Popen[bytes]) -> tuple[StoreAddress, str] | None:
    while process.poll() is None:
        if file.exists() and (text := file.read_text()).endswith("\n"):
            endpoint, run_id = text.split()
            return StoreAddress.parse(endpoint), run_id
        time.sleep(0.05)
    return None


def _outcome(failure: Failure, report: dict[str, Any], folder: Path) -> SwiftOutcome:
    outcome = SwiftOutcome(report["recoveries"])
    first, last = works_of(Store(str(folder / "store")), failure.machines)
    outcome.bytes_logged = {rank: sum(work.log_bytes for work in works) for rank, works in last.items()}
    outcome.killed = _struck(folder / "logs")
    if outcome.killed is None or not outcome.recoveries or (trace := outcome.recoveries[0]["trace"]) is None:
        return outcome
    before = first[0][0]
    if before.began is not None and before.interrupted is not None and before.steps:
        outcome.iteration_s = (before.interrupted - before.began) / before.steps
    loaded = replay_began(outcome.recoveries[0], failure.machine)
    iterations = [*_spans(trace, FIRST_ITERATION)]
    if loaded is not None and not trace["missing"] and len(iterations) == failure.machines:
        outcome.loaded = loaded
        outcome.live = max(began for _, began, _ in iterations)
        outcome.done = max(ended for _, _, ended in iterations)
    return outcome


def _struck(logs: Path) -> float | None:
    """When the first injected fault killed a process, as that wrote into its log at last. Unix seconds."""
    said = (_STRIKES.search(log.read_text()) for log in logs.rglob("stderr.log"))
    return min((float(line[1]) for line in said if line), default=None)


def works_of(store: Store, workers: int) -> tuple[dict[int, Works], dict[int, Works]]:
    """By rank, what its first process did in each generation, and what its last one did."""
    record = store.read_json(RECORD)
    if record is None:
        raise CommandError(f"{store.url} belongs to no run")
    run_id = record["run_id"]
    files = WorkerFiles(store, run_id)
    histories = [files.read(WorkerHistory, name) for name in files.names(HISTORIES)]
    histories.sort(key=lambda history: history.started_in)
    last = {history.rank: history.generations for history in histories}
    first = {history.rank: history.generations for history in reversed(histories)}
    if {*last} != {*range(workers)}:
        raise CommandError(f"{store.url} tells of the work of workers {sorted(last)} only")
    return first, last


def replay_began(recovery: Mapping[str, Any], rank: int) -> float | None:
    """When a worker had its checkpoint in a recovery, and began to replay. None if it did not."""
    trace = recovery["trace"] or {"participants": ()}
    return max((began for of, began, _ in _spans(trace, "replay") if of == rank), default=None)


def _spans(trace: Mapping[str, Any], name: str) -> Iterator[tuple[int, float, float]]:
    """Of workers, the spans of that name: the rank, when it began, and when it ended, in Unix seconds."""
    for one in trace["participants"]:
        for span in one["spans"]:
            if one["rank"] is not None and span["name"] == name:
                began = trace["zero"] + span["began_ms"] / 1e3
                yield one["rank"], began, began + span["ms"] / 1e3


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
