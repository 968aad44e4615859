"""Sentinels of many machines in a few processes of this host, of which a rack is stopped at once."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.usage import cpu_seconds

_SCRIPT = Path(__file__).parent / "scripts" / "sentinels.py"
_PER_PROCESS = 256
_DEADLINE_S = 120.0
_SETTLED = 2.0
"""How many times the silence one waits before, and after the last loss, for reports that should not be."""


@dataclass(frozen=True)
class Rack:
    """How a loss of many machines at once was found.

    Attributes:
        machines: in all.
        lost: at once.
        first_s: from the stop to the first report.
        all_s: to the last machine's first report.
        reports: in all, also of machines that others had reported.
        wrong: reports of machines that were not stopped.
        cpu: processors that all sentinels together took before, as a share of one.
    """

    machines: int
    lost: int
    first_s: float
    all_s: float
    reports: int
    wrong: int
    cpu: float


class _Group:
    """One process with many sentinels."""

    def __init__(self, names: list[str], silence_s: float, heard: queue.Queue[dict[str, Any]]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(silence_s), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._heard = heard
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._heard.put(json.loads(line))

    def tell(self, **order: Any) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def cpu_s(self) -> float:
        """The processor time it has taken."""
        return cpu_seconds(self.process.pid)


@contextmanager
def _groups(
    names: list[list[str]], silence_s: float
) -> Iterator[tuple[list[_Group], queue.Queue[dict[str, Any]]]]:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    groups = [_Group(some, silence_s, heard) for some in names]
    try:
        yield groups, heard
    finally:
        for group in groups:
            group.process.kill()
            group.process.wait()


def lose_rack(machines: int, lost: int, silence_s: float, seed: int = 0) -> Rack:
    """Stop some of many machines at once, and see how the others find them.

    Args:
        machines: in all; each has a sentinel, and watches three others.
        lost: of these.
        silence_s: as ``--machine-silence``.
        seed: of their names, which are random, as those of real ones.
    """
    chance = random.Random(seed)
    names = [f"m-{chance.getrandbits(32):08x}.0" for _ in range(machines)]
    doomed, others = names[:lost], names[lost:]
    parts = [doomed, *(others[i : i + _PER_PROCESS] for i in range(0, len(others), _PER_PROCESS))]
    with _groups(parts, silence_s) as (groups, heard):
        ring: dict[str, str] = {}
        for _ in groups:
            ring |= heard.get(timeout=_DEADLINE_S)["addresses"]
        for group in groups:
            group.tell(ring=ring)
        early = _until_ready(heard, len(groups))
        began, cpu_s = time.monotonic(), sum(group.cpu_s() for group in groups)
        threading.Event().wait(_SETTLED * silence_s)
        cpu = (sum(group.cpu_s() for group in groups) - cpu_s) / (time.monotonic() - began)
        stopped_at = time.monotonic()
        os.kill(groups[0].process.pid, signal.SIGSTOP)
        reports = [*early, *_reports(heard, groups[1:], set(doomed), silence_s)]
    first: dict[str, float] = {}
    for report in reports:
        first.setdefault(report["lost"], report["at"] - stopped_at)
    found = [first[name] for name in doomed]
    wrong = sum(report["lost"] not in set(doomed) for report in reports)
    return Rack(machines, lost, min(found), max(found), len(reports), wrong, cpu)


def _until_ready(heard: queue.Queue[dict[str, Any]], groups: int) -> list[dict[str, Any]]:
    early: list[dict[str, Any]] = []
    while groups:
        line = heard.get(timeout=_DEADLINE_S)
        if "ready" in line:
            groups -= 1
        else:
            early.append(line)
    return early


def _reports(
    heard: queue.Queue[dict[str, Any]], groups: list[_Group], doomed: set[str], silence_s: float
) -> list[dict[str, Any]]:
    """All reports until a while after the last loss. Each goes to all, as the journal's entries do."""
    reports: list[dict[str, Any]] = []
    open_losses = set(doomed)
    while True:
        try:
            report = heard.get(timeout=_DEADLINE_S if open_losses else _SETTLED * silence_s)
        except queue.Empty:
            if open_losses:
                raise
            return reports
        reports.append(report)
        open_losses.discard(report["lost"])
        for group in groups:
            group.tell(lost=report["lost"])
