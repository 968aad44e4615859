"""What all benchmarks share: running a command, medians, and saying on which machine.

Nothing here prints results; ``append_results`` is called with ``--update`` only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a run's end closes connections that we watch it by

import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
TRAIN_WITH = ROOT / "benchmarks" / "scripts" / "train_with.py"
"""``train_swift.py`` with other arguments of the session, which are in the variable SESSION."""
_GRACE_S = 15.0


class CommandError(Exception):
    """A command of a benchmark failed; the message holds the end of what it printed."""


# ---------------------------------------------------------------------------------------------- commands


@contextlib.contextmanager
def started(command: Sequence[str], output: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command beside us; at the end of the block, however that ends, nothing of it is left.

    Args:
        command: what to run.
        output: file for what it prints.
        env: variables to add to our own.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we end it in order
        )
        try:
            yield process
        finally:
            _end(process)


def finished(command: Sequence[str], output: Path, **env: str) -> None:
    """Runs a command to its end.

    Raises:
        CommandError: if its exit code is not 0.
    """
    with started(command, output, **env) as process:
        process.wait()
    check(process, output)


def check(process: subprocess.Popen[bytes], output: Path) -> None:
    """Raises a :class:`CommandError` if a command that has ended did not end well."""
    if process.returncode:
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
        raise CommandError(f"exit code {process.returncode} of {process.args!r}\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a command to end; kills it and all that it started if it does not."""
    if process.poll() is not None:
        return
    offspring = descendants(process.pid)
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    for pid in offspring:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and all below it have used so far."""
    return sum(cpu_by_process([pid, *descendants(pid)]).values())


def cpu_by_process(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds that each process has used so far; those that have ended are left out."""
    seconds: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            seconds[pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


def descendants(pid: int) -> list[int]:
    """All processes below one, from ``/proc``; none on systems without it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def swift_run(*args: str) -> list[str]:
    """The command ``swift-run --standalone`` with further arguments."""
    return [sys.executable, "-m", "swift_ft.cli.run", "--standalone", *args]


def torchrun(*args: str) -> list[str]:
    """The command ``torchrun --standalone`` with further arguments."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *args]


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
    """What was asked for, and what was measured.

    Attributes:
        name: what is measured.
        limit: ``<=`` or ``>=`` and a number, in words.
        measured: the value, in words.
        met: whether it is.
    """

    name: str
    limit: str
    measured: str
    met: bool

    def to_dict(self) -> dict[str, str | bool]:
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
    rows = [[t.name, t.limit, t.measured, "met" if t.met else "**missed**"] for t in targets]
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


def argument_parser(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--update", action="store_true", help="append a section to benchmarks/RESULTS.md")
    parser.add_argument("--repetitions", type=int, default=repetitions, help="default: %(default)s")
    return parser
