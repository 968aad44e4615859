"""What the parts of the benchmark on a GPU share: figures, said as soon as they are there, and sizes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from benchmarks.lib.results import Summary
from examples.commands import CommandError

__all__ = ["Figure", "Part", "end_in_order", "limited", "run_part"]


@dataclass(frozen=True)
class Figure:
    """One result. A later one of the same name takes its place: it has more repetitions.

    Attributes:
        name: what was measured.
        value: as text.
        asked: the limit, as text; empty if there is none.
        met: whether it is met.
    """

    name: str
    value: str
    asked: str = ""
    met: bool | None = None

    def text(self) -> str:
        """In one line."""
        judged = {None: "", True: f" (asked {self.asked}: met)", False: f" (asked {self.asked}: MISSED)"}
        return f"{self.name}: {self.value}{judged[self.met]}"


def limited(name: str, measured: Summary, limit: float, unit: str = "") -> Figure:
    """A figure that shall not be larger than a limit."""
    return Figure(name, measured.text(unit), f"<= {limit:g}{unit}", measured.median <= limit)


@dataclass(frozen=True)
class Part:
    """How a part is run.

    Attributes:
        device: ``cuda``, or ``cpu`` for a trial.
        small: sizes of a trial.
    """

    device: str
    small: bool


def end_in_order() -> None:
    """Let SIGTERM unwind this process, so that what it has started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_part(description: str | None, measure: Callable[[Part], Iterator[Figure]]) -> int:
    """The main function of a part: prints each figure as a line of JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="small sizes on a CPU: a trial of this script")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        print("no CUDA device, nothing can be measured (--small tries the scripts on a CPU)", file=sys.stderr)
        return 2
    end_in_order()
    try:
        for figure in measure(Part("cpu" if args.small else "cuda", args.small)):
            print(json.dumps(asdict(figure)), flush=True)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
