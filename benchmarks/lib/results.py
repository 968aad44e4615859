"""Shared by all benchmarks: medians, targets, tables, and the machine that the numbers depend on.

Nothing here prints results; only ``--update`` calls ``append_results``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "RESULTS.md"
TRAIN_WITH = BENCHMARKS / "recovery" / "scripts" / "train_with.py"
"""``train_swift.py`` with the session's arguments replaced by those in the variable SESSION."""


# ------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Summary:
    """The median of some repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarises at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, unit: str = " s", digits: int = 3) -> str:
        """``0.512 s (0.498-0.530)``."""
        one = f"{self.median:.{digits}f}{unit}"
        return one if self.low == self.high else f"{one} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def to_dict(self) -> dict[str, float]:
        """A JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """A measured value, and the target if there is one.

    Attributes:
        name: what is measured.
        limit: ``<=`` or ``>=`` and a number, as text; empty without a target.
        measured: the value, as text.
        met: whether the target is met; None without one.
    """

    name: str
    limit: str
    measured: str
    met: bool | None

    def to_dict(self) -> dict[str, str | bool | None]:
        """A JSON-ready dictionary."""
        return asdict(self)


# ------------------------------------------------------------------------------------------------ results


def machine() -> dict[str, str]:
    """The machine and the software that a number depends on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def target_table(targets: Sequence[Target]) -> str:
    """Targets, met or missed."""
    judged = {None: "", True: "met", False: "**missed**"}
    rows = [[t.name, t.limit, t.measured, judged[t.met]] for t in targets]
    return table(["target", "asked", "measured", ""], rows)


def append_results(title: str, body: str) -> None:
    """Appends a section to ``benchmarks/RESULTS.md``, with the date and the machine."""
    facts = machine()
    where = (
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory']}, {facts['system']}, "
        f"Python {facts['python']}, torch {facts['torch']}, load average at the end {facts['load']}."
    )
    old = (
        RESULTS.read_text()
        if RESULTS.exists()
        else "# Results\n\nWhat the benchmarks measured, newest last.\n"
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    RESULTS.write_text(f"{old.rstrip()}\n\n## {title}, {date}\n\n{where}\n\n{body.strip()}\n")


def argument_parser(description: str | None, repetitions: int | None = None) -> argparse.ArgumentParser:
    """The options that all benchmarks share; with ``--repetitions`` if there is a default for it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--update", action="store_true", help="append a section to benchmarks/RESULTS.md")
    if repetitions is not None:
        parser.add_argument("--repetitions", type=int, default=repetitions, help="default: %(default)s")
    return parser
