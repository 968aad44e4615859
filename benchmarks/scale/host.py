"""A process with the control planes of several machines, and what they cost it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

from benchmarks.scale.machine import SILENCE_S, Job, Machine
from benchmarks.scale.shared import be_patient, share
from benchmarks.scale.store_traffic import StoreTraffic
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from swift_ft.torch_adapters import connections

_STACK_BYTES = 1 << 18
_STARTERS = 8
_SWITCH_S = 1.0
"""So often a thread that waits for the interpreter asks for it. By default hundreds do so each 5 ms."""
_DIE_WITH_PARENT = 1  # of Linux's prctl()


@dataclass(frozen=True)
class Costs:
    """What a process has used since it began.

    Attributes:
        cpu_s: of all its threads.
        operations: that it asked of the store.
        bytes: of their keys and values.
    """

    cpu_s: float
    operations: int
    bytes: int

    def since(self, before: Costs) -> Costs:
        """What was used in between."""
        return Costs(
            self.cpu_s - before.cpu_s, self.operations - before.operations, self.bytes - before.bytes
        )


@dataclass(frozen=True)
class Events:
    """A part of the journal.

    Attributes:
        all: how many events.
        reports: of them, of workers' status.
        blocks: in which they came.
    """

    all: int
    reports: int
    blocks: int


class Host:
    """A forked child with some machines. Must be made while this process has a single thread.

    Args:
        job: where its machines join.
        indices: the slots that they ask for; None for a spare.
        shares: they share what they would all compute alike (`shared.py`).
    """

    def __init__(self, job: Job, indices: Sequence[int | None], *, shares: bool = False) -> None:
        context = get_context("fork")
        self._line, child = context.Pipe()
        self.machines = len(indices)
        self._process = context.Process(target=_serve, args=(child, job, tuple(indices), shares), daemon=True)
        self._process.start()
        child.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self) -> None:
        """Let the machines join."""
        self._line.send("begin")

    def live(self, generation: int, timeout_s: float) -> dict[str, float]:
        """Wait until all its participants have their order to go live in a generation.

        Returns:
            When the last agent and the last worker had it, by the clock that all processes share.
        """
        self._line.send(("live", generation, timeout_s))
        if not self._line.poll(timeout_s + 30):
            raise TimeoutError(f"process {self.pid} does not answer")
        answer = self._line.recv()
        if isinstance(answer, str):
            raise TimeoutError(answer)
        return dict(answer)

    def costs(self) -> Costs:
        """What it has used so far."""
        self._line.send("costs")
        if not self._line.poll(60):
            raise TimeoutError(f"process {self.pid} does not answer")
        costs = self._line.recv()
        assert isinstance(costs, Costs)
        return costs

    def journal(self, losses: int) -> Events:
        """What was written into the journal from the next loss on, after so many."""
        self._line.send(("journal", losses))
        if not self._line.poll(60):
            raise TimeoutError(f"process {self.pid} does not answer")
        events = self._line.recv()
        assert isinstance(events, Events)
        return events

    def kill(self) -> float:
        """SIGKILL it; returns when, by the clock that all processes share."""
        at = time.monotonic()
        self._process.kill()
        return at

    def close(self) -> None:
        """Kill it, if it still runs, and wait for its end."""
        self._process.kill()
        self._process.join()
        self._line.close()


class _Tally:
    """Which participants of this process are live, by generation."""

    def __init__(self, machines: int) -> None:
        self._machines = machines
        self._changed = threading.Condition()
        self._live: dict[tuple[str, int], list[float]] = {}

    def note(self, kind: str, generation: int, at: float) -> None:
        """Called in the threads of all machines."""
        with self._changed:
            times = self._live.setdefault((kind, generation), [])
            times.append(at)
            if len(times) == self._machines:
                self._changed.notify_all()

    def wait(self, generation: int, timeout_s: float) -> dict[str, float] | str:
        """When the last participant of each kind was live, or who is missing."""

        def counted(kind: str) -> list[float]:
            return self._live.get((kind, generation), [])

        kinds = ("agent", "worker")
        with self._changed:
            self._changed.wait_for(
                lambda: all(len(counted(kind)) == self._machines for kind in kinds), timeout_s
            )
            if missing := [kind for kind in kinds if len(counted(kind)) < self._machines]:
                counts = ", ".join(f"{len(counted(kind))} {kind}s" for kind in missing)
                after = f"in generation {generation} after {timeout_s:g} s"
                return f"only {counts} of {self._machines} were live {after}"
            return {kind: max(counted(kind)) for kind in kinds}


def _serve(line: Connection, job: Job, indices: tuple[int | None, ...], shares: bool) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    threading.stack_size(_STACK_BYTES)
    sys.setswitchinterval(_SWITCH_S)
    be_patient(SILENCE_S)
    if shares:
        share()
        gc.disable()  # it would look through the objects of all machines here: each of its own has few
    # Each new connection is looked for among all of this process. A machine of its own has few of them.
    connections._connections = lambda: iter(())
    traffic = StoreTraffic()
    traffic.install()
    tally = _Tally(len(indices))
    machines: list[Machine] = []
    while True:
        try:
            message = line.recv()
        except EOFError:
            os._exit(0)
        if message == "begin":
            with ThreadPoolExecutor(_STARTERS) as pool:
                machines += pool.map(lambda index: Machine(job, index, tally.note), indices)
            for machine in machines:
                machine.start()
        elif message == "costs":
            line.send(Costs(time.process_time(), traffic.operations(), traffic.bytes()))
        elif message[0] == "journal":
            line.send(_journal(job, message[1]))
        else:
            _, generation, timeout_s = message
            line.send(tally.wait(generation, timeout_s))


def _journal(job: Job, losses: int) -> Events:
    journal = open_journal(partial(connect, job.store, job.run_id), by="benchmark")
    lost: set[str] = set()
    number = events = reports = blocks = 0
    while (block := journal.read(number, 0.0)) is not None:
        number += 1
        lost.update(stamped.event.machine for stamped in block if isinstance(stamped.event, ev.MachineLost))
        if len(lost) > losses:
            events += len(block)
            reports += sum(isinstance(stamped.event, ev.StatusReported) for stamped in block)
            blocks += 1
    return Events(events, reports, blocks)
