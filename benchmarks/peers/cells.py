"""One cell of the side by side: one system trains, a machine or a process of it dies, and what came of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.lib.ports import free_port, is_listening
from benchmarks.peers.processes import MACHINE, processes_with
from examples.commands import CommandError, started

Failure = Literal["spare", "again", "process"]
"""A machine is lost and a spare waits; it is lost and started again; a worker's process dies alone."""
MACHINES, KILLED = 4, 1
MODEL = ("--layers", "4", "--width", "128", "--heads", "4", "--microbatch-size", "1")
_RUN = "PEERS_RUN"
_WARM_UP = 5  # first steps that are not timed
_AFTER_SAVE = 3  # iterations in which the price of a checkpoint is looked for
_MORE = 4  # iterations after the interrupted one, and then weights are compared
_POLL_S = 0.02
_STARTED_S = 120.0


@dataclass(frozen=True)
class Case:
    """What is trained, and what happens to it.

    Attributes:
        layout: ``data``, ``pipeline`` or ``hsdp``.
        failure: what dies; None in an undisturbed training.
        distance: completed iterations since the checkpoint.
    """

    layout: str
    failure: Failure | None
    distance: int

    @property
    def checkpoint_every(self) -> int:
        """Iterations in the one checkpoint before the failure. There is none between it and the failure."""
        return max(self.distance + 1, 10)

    @property
    def kill_iteration(self) -> int:
        """In which the worker dies."""
        return self.checkpoint_every + self.distance

    @property
    def last(self) -> int:
        """The iteration after which weights are compared."""
        return self.kill_iteration + _MORE


@dataclass(frozen=True)
class Place:
    """Where a run is.

    Attributes:
        folder: for all its files.
        port: where its machines meet; the next one is free, too.
    """

    folder: Path
    port: int

    @property
    def trace(self) -> Path:
        """What workers write."""
        return self.folder / "trace"

    @property
    def store(self) -> Path:
        """What all machines share."""
        return self.folder / "store"


@dataclass(frozen=True)
class Start:
    """How something is started.

    Attributes:
        command: its words.
        env: variables to add.
        meets: others are started only once it listens at the place's port.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    meets: bool = False


@dataclass(frozen=True)
class System:
    """What is compared.

    Attributes:
        name: in tables.
        scripts: by layout.
        machine: how a machine is started, from its number, the case, the place and the script's words.
        service: what has to run on none of the machines.
        cannot: by layout, failure or both, why it has no such cell.
        elastic: a worker less is no reason to stop; goes on until the replacement has joined.
        shrinks: without a spare, the world stays smaller.
        needs: the distribution that has to be installed, and its version.
        settings: how it is set up, in words.
        fails: parts of it that do not run without a GPU or with this torch, and what they say.
    """

    name: str
    scripts: Mapping[str, str]
    machine: Callable[[int, Case, Place, list[str]], Start]
    service: Callable[[Place], Start] | None = None
    cannot: Mapping[str, str] = field(default_factory=dict)
    elastic: bool = False
    shrinks: bool = False
    needs: tuple[str, str] | None = None
    settings: str = ""
    fails: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why it cannot run here at all; None if it can."""
        if self.needs is None:
            return None
        name, wanted = self.needs
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: pip install {name}=={wanted}"
        return None if found == wanted else f"not measured: {name} {found} is installed, not {wanted}"

    def why_not(self, case: Case) -> str | None:
        """Why there is no such cell; None if there is."""
        if case.layout not in self.scripts:
            return self.cannot.get(case.layout, "not measured")
        return self.cannot.get(case.failure or "") or self.cannot.get(f"{case.layout} {case.failure}")


@dataclass(frozen=True)
class Outcome:
    """What came of one cell; times in seconds, after the kill if nothing else is said.

    Attributes:
        step_s: a failure-free step of worker 0, the median.
        peak_mb: most memory of a worker before the failure.
        digests: by worker, of its parameters after the iteration that is asked for.
        checkpoint_s: how much longer the steps after a checkpoint took together.
        detected_s: until the first survivor has left the interrupted iteration.
        new_s: until worker 0 (in elastic systems, any) has completed an iteration that none had before.
        full_s: until as many workers as before have.
        lost: completed iterations that are repeated.
        cpu_s: CPU time of worker 0 in a failure-free step, the median.
    """

    step_s: float
    peak_mb: float
    digests: dict[int, dict[int, str]]
    checkpoint_s: float | None = None
    detected_s: float | None = None
    new_s: float | None = None
    full_s: float | None = None
    lost: int | None = None
    cpu_s: float | None = None


# ---------------------------------------------------------------------------------------------------- running


def run(system: System, case: Case, folder: Path, digest_at: Sequence[int], deadline_s: float) -> Outcome:
    """Trains once.

    Raises:
        CommandError: if the training fails, or takes too long, or nobody was killed.
    """
    place = Place(folder, free_port(in_a_row=2))
    place.trace.mkdir(parents=True)
    place.store.mkdir()
    token = uuid.uuid4().hex
    words = [
        *(str(Path(__file__).parent / "scripts" / system.scripts[case.layout]), "--trace", str(place.trace)),
        *("--digest-at", *map(str, digest_at), *MODEL),
        *("--iterations", str(10**6 if system.elastic and case.failure else max(digest_at) + 1)),
    ]
    if case.failure:
        words += ["--kill-iteration", str(case.kill_iteration), "--kill-rank", str(KILLED)]
        words += ["--kill", "process" if case.failure == "process" else "machine"]
        words += ["--kill-call", "4" if case.layout == "pipeline" else "1"]
    try:
        with contextlib.ExitStack() as stack:
            _train(system, case, place, words, token, stack, deadline_s)
            for pid in processes_with(_RUN, token):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:  # some have left their session and their parents
        for pid in processes_with(_RUN, token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return evaluate(system, case, read(place.trace), max(digest_at))


def _train(
    system: System,
    case: Case,
    place: Place,
    words: list[str],
    token: str,
    stack: contextlib.ExitStack,
    deadline_s: float,
) -> None:
    deadline = time.monotonic() + deadline_s
    outputs: dict[str, Path] = {}

    def begin(name: str, start: Start) -> subprocess.Popen[bytes]:
        outputs[name] = place.folder / f"{name}.txt"
        env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **start.env}
        env |= {_RUN: token, MACHINE: f"{token}-{name}"}
        process = stack.enter_context(started(start.command, outputs[name], **env))
        ready = time.monotonic() + _STARTED_S
        while start.meets and not is_listening(place.port):
            if process.poll() is not None or time.monotonic() > ready:
                raise CommandError(f"{system.name}: {name} does not listen\n{_ends(outputs)}")
            time.sleep(_POLL_S)
        return process

    if system.service is not None:
        begin("service", system.service(place))
    count = MACHINES + (case.failure == "spare")
    starts = [system.machine(number, case, place, words) for number in range(count)]
    machines = {number: begin(f"machine{number}", start) for number, start in enumerate(starts)}
    lost: set[int] = set()
    while not _done(system, case, place.trace, machines, lost):
        for number, process in list(machines.items()):
            code = process.poll()
            if code == -signal.SIGKILL and case.failure in ("spare", "again") and not lost:
                lost.add(number)
                if case.failure == "again" and not system.shrinks:
                    machines[number] = begin(f"machine{number}-again", starts[number])
            elif code and number not in lost:
                raise CommandError(f"{system.name}: machine {number} ended with {code}\n{_ends(outputs)}")
        if time.monotonic() > deadline:
            if system.elastic and any(line["event"] == "weights" for line in read(place.trace)):
                return  # it went on, but the replacement has not joined
            raise CommandError(f"{system.name} was not done after {deadline_s:.0f} s\n{_ends(outputs)}")
        time.sleep(_POLL_S)


def _ends(outputs: Mapping[str, Path]) -> str:
    return "\n".join(
        f"--- {name}\n{path.read_text(errors='replace')[-1200:]}" for name, path in outputs.items()
    )


def _done(
    system: System,
    case: Case,
    trace: Path,
    machines: Mapping[int, subprocess.Popen[bytes]],
    lost: set[int],
) -> bool:
    """Whether all is known that is asked for."""
    if all(process.poll() == 0 for number, process in machines.items() if number not in lost):
        return True
    if not case.failure or not (trace / "killed").exists():
        return False
    lines = read(trace)
    compared = {line["rank"] for line in lines if line["event"] == "weights"}
    if not system.elastic:
        return compared >= set(_expected(system, case))
    return 0 in compared and _full_at(system, case, lines, _killed(lines)) is not None


def _expected(system: System, case: Case) -> list[int]:
    fewer = system.shrinks and case.failure != "spare"
    return list(range(MACHINES - fewer))


# ----------------------------------------------------------------------------------------------------- traces

Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """All events of all workers, as they happened; each with its ``rank`` and its ``file``."""

    def lines() -> Iterator[Line]:
        for path in folder.glob("*.jsonl"):
            for text in path.read_text().splitlines(keepends=True):
                if text.endswith("\n"):
                    yield {"rank": int(path.name.partition("-")[0]), "file": path.name, **json.loads(text)}

    return sorted(lines(), key=lambda line: float(line["at"]))


def evaluate(system: System, case: Case, lines: Sequence[Line], last: int) -> Outcome:
    """What a trace says.

    Raises:
        CommandError: if something that every run has is not in it.
    """
    killed = _killed(lines) if case.failure else float("inf")
    ends = [one for one in lines if one["event"] == "end" and one["at"] < killed]
    of_first = [one for one in ends if one["rank"] == 0]
    took = {
        b["iteration"]: b["at"] - a["at"]
        for a, b in pairwise(of_first)
        if b["iteration"] == a["iteration"] + 1
    }
    saved = range(case.checkpoint_every, case.checkpoint_every + _AFTER_SAVE)
    usual = [took[one["iteration"]] for one in of_first if one["iteration"] in took and _timed(one, saved)]
    if not usual:
        raise CommandError(f"{system.name}: no steps to time")
    digests: dict[int, dict[int, str]] = {}
    for line in lines:
        if line["event"] == "weights":
            digests.setdefault(line["iteration"], {})[line["rank"]] = line["digest"]
    used = [b["cpu"] - a["cpu"] for a, b in pairwise(of_first) if b["iteration"] in took and _timed(b, saved)]
    peak_mb = max(one["peak_kb"] for one in ends) / 1024
    found = Outcome(median(usual), peak_mb, digests, cpu_s=median(used))
    if not case.failure:
        return found
    after = [one for one in lines if one["at"] > killed]
    left = [one["at"] for one in after if one["event"] == "left"]
    new = _ended([one for one in after if system.elastic or one["rank"] == 0], case.kill_iteration)
    full = _full_at(system, case, lines, killed)
    if new is None or last not in digests:
        raise CommandError(f"{system.name}: nobody went on after the kill")
    paid = [took[iteration] for iteration in saved if iteration in took]
    return Outcome(
        found.step_s,
        found.peak_mb,
        digests,
        checkpoint_s=sum(paid) - len(paid) * found.step_s if len(paid) == _AFTER_SAVE else None,
        detected_s=min(left) - killed if left else None,
        new_s=new - killed,
        full_s=None if full is None else full - killed,
        lost=_lost(system, case, after),
        cpu_s=found.cpu_s,
    )


def _lost(system: System, case: Case, after: Sequence[Line]) -> int:
    """Completed iterations that are repeated after a kill."""
    if system.elastic:  # a worker that starts anew gets its peers' state in its iteration 0
        again = {one["iteration"] for one in after if one["event"] == "end"}
        return len(again & set(range(1, case.kill_iteration)))
    begun = [int(one["iteration"]) for one in after if one["event"] == "begin" and one["rank"] == 0]
    return max(0, case.kill_iteration - min(begun))


def _timed(end: Line, saved: range) -> bool:
    """Whether the step that ended is one of those that count."""
    return end["iteration"] > _WARM_UP and end["iteration"] not in saved


def _killed(lines: Sequence[Line]) -> float:
    for line in lines:
        if line["event"] == "kill":
            return float(line["at"])
    raise CommandError("no worker was killed")


def _ended(some: Sequence[Line], since: int) -> float | None:
    ends = (one for one in some if one["event"] == "end" and one["iteration"] >= since)
    return min((float(one["at"]) for one in ends), default=None)


def _full_at(system: System, case: Case, lines: Sequence[Line], killed: float) -> float | None:
    """When as many workers as before had completed a new iteration; None if they did not."""
    after = [one for one in lines if one["at"] > killed]
    if system.elastic:
        return _ended([one for one in after if one.get("workers") == MACHINES], case.kill_iteration)
    by_rank = [[one for one in after if one["rank"] == rank] for rank in range(MACHINES)]
    times = [_ended(some, case.kill_iteration) for some in by_rank]
    known = [one for one in times if one is not None]
    return max(known) if len(known) == MACHINES else None
