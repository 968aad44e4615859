"""What the parts of the benchmark on a GPU share: figures, said as soon as they are there, and sizes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.lib.results import Summary, Target
from examples.commands import CommandError


def figure(name: str, value: str) -> Target:
    """A measured value of which nothing is asked."""
    return Target(name, "", value, None)


def limited(name: str, measured: Summary, limit: float, unit: str = "") -> Target:
    """One that shall not be larger than a limit."""
    return Target(name, f"<= {limit:g}{unit}", measured.text(unit), measured.median <= limit)


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


def run_part(description: str | None, measure: Callable[[Part], Iterator[Target]]) -> int:
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
        for found in measure(Part("cpu" if args.small else "cuda", args.small)):
            print(json.dumps(found.to_dict()), flush=True)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
