"""Shared by all benchmarks: medians, targets, tables, the machine that figures depend on, the record."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.figures import cell_text
from benchmarks.lib.markdown import TARGET_COLUMNS, VERDICTS, read_body, table
from benchmarks.lib.runs import FOLDER, Host, Run, write_run
from benchmarks.lib.subjects import SUBJECTS
from examples.commands import CommandError

__all__ = [
    "BENCHMARKS",
    "TRAIN_WITH",
    "Summary",
    "Target",
    "add_record_option",
    "argument_parser",
    "finish",
    "machine",
    "of_repetitions",
    "record",
    "run_benchmark",
    "table",
    "target_table",
]

BENCHMARKS = Path(__file__).resolve().parents[1]
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


def target_table(targets: Sequence[Target]) -> str:
    """Targets, met or missed."""
    rows = [[t.name, t.limit, t.measured, VERDICTS[t.met]] for t in targets]
    return table(TARGET_COLUMNS, rows)


def of_repetitions(repetitions: int) -> str:
    """What the figures of so many repetitions are: with one, there is no median of anything."""
    if repetitions == 1:
        return "One run of each: no medians"
    return f"Medians (ranges) of {repetitions} interleaved repetitions"


def finish(
    subject: str,
    body: str,
    facts: Mapping[str, Any],
    args: argparse.Namespace,
    *,
    well: bool = True,
) -> int:
    """Ends a benchmark: prints what was measured, and records it if that is asked for.

    Args:
        subject: a key of ``subjects.SUBJECTS``.
        body: all that was measured: Markdown with tables.
        facts: what ``--json`` prints beside the machine and the targets, which are in the body; dataclasses
            may be among them.
        args: the command line.
        well: whether it ended well.

    Returns:
        The exit code.
    """
    if args.json:
        targets = [{**asdict(one), "measured": cell_text(one.measured)} for one in read_body(body).targets]
        print(json.dumps({"machine": machine(), **facts, "targets": targets}, indent=1, default=asdict))
    else:
        print(body)
    if args.record:
        record(subject, body, args)
    return 0 if well else 1


def run_benchmark(main: Callable[[], int]) -> int:
    """Runs a main function, and returns its exit code. If one of its commands fails, one line says so."""
    try:
        return main()
    except CommandError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


def record(subject: str, body: str, args: argparse.Namespace, beside: str = "") -> None:
    """Writes what was measured into a file of its own, in the folder that ``--record`` names.

    Args:
        subject: a key of ``subjects.SUBJECTS``.
        body: what the benchmark prints: Markdown with tables.
        args: the command line, with ``record`` and maybe ``repetitions``.
        beside: what else the host did meanwhile, in words.
    """
    title = SUBJECTS[subject].title  # before anything is written: a benchmark has to use a known name
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    folder: Path = args.record
    found = read_body(body)
    run = Run(
        subject,
        today,
        next(n for n in itertools.count(1) if not (folder / f"{today}-{subject}-{n}.json").exists()),
        replace(_host(), beside=beside),
        commit=_commit(),
        command=_command(),
        repetitions=getattr(args, "repetitions", None),
        about=found.about,
        tables=found.tables,
        targets=found.targets,
        notes=found.notes,
    )
    print(
        f"# {title}: recorded in {write_run(run, folder)}; `make docs` puts it on the page", file=sys.stderr
    )


def _host() -> Host:
    facts = machine()
    return Host(
        cores=int(facts["cores"]),
        cpu=facts["cpu"],
        memory_gib=int(facts["memory"].split()[0]),
        system=facts["system"],
        python=facts["python"],
        torch=facts["torch"],
        load=float(facts["load"]),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    )


def _commit() -> str | None:
    """What was measured, ``-dirty`` if it is in no commit; None outside of a repository."""
    command = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def _command() -> str:
    main = sys.modules["__main__"].__spec__
    program = f"-m {main.name}" if main else sys.argv[0]
    words = [*program.split(" ", 1), *_without_record(sys.argv[1:])]
    return shlex.join(["python", *map(without_place, words)])


def without_place(word: str) -> str:
    """An argument, of a path of this machine only the name: where it is says nothing elsewhere."""
    return f"../{Path(word).name}" if word.startswith("/") else word


def _without_record(words: Sequence[str]) -> list[str]:
    """Arguments without ``--record`` and its folder: they say where a file went, not what was measured."""
    if "--record" not in words:
        return list(words)
    at = words.index("--record")
    folder = at + 1 < len(words) and not words[at + 1].startswith("-")
    return [*words[:at], *words[at + 1 + folder :]]


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """``--record [FOLDER]``, which the variable ``BENCH_RECORD`` sets for all benchmarks of a ``make``."""
    parser.add_argument(
        "--record",
        nargs="?",
        type=Path,
        const=FOLDER,
        default=Path(chosen) if (chosen := os.environ.get("BENCH_RECORD")) else None,
        metavar="FOLDER",
        help="write the figures as JSON, by default into benchmarks/results",
    )


def argument_parser(description: str | None, repetitions: int | None = None) -> argparse.ArgumentParser:
    """The options that all benchmarks share; with ``--repetitions`` if there is a default for it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    add_record_option(parser)
    if repetitions is not None:
        parser.add_argument("--repetitions", type=int, default=repetitions, help="default: %(default)s")
    return parser
