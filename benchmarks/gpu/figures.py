"""All figures that need a GPU, each printed as soon as it is there, within four minutes.

    python -m benchmarks.gpu.figures                  on a machine with a GPU
    python -m benchmarks.gpu.figures --small          tries all scripts on a CPU; its numbers say nothing
    python -m benchmarks.gpu.figures --only undo      some parts

Each part is a process of its own with a time limit. What it has said by then counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import torch

from benchmarks.gpu.part import end_in_order
from benchmarks.lib.results import Target, add_record_option, record, target_table

LIMITS_S = {"step": 95.0, "recovery": 65.0, "undo": 30.0, "bubbles": 30.0, "unpack": 15.0}
"""Of the parts, in the order in which they run."""
OPTIONS = {"bubbles": ("--figures", "--repetitions=3", "--iterations=10", "--message-mib", "8", "32")}
PATIENCE = 20
"""A trial on a CPU, beside other work, may take so many times as long."""
ENDING_S = 20.0


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a trial on a CPU")
    parser.add_argument("--only", nargs="+", choices=[*LIMITS_S], default=[*LIMITS_S], metavar="PART")
    add_record_option(parser)
    args = parser.parse_args()
    if args.small and args.record:
        parser.error("--small is a trial: its figures are not recorded")
    if not args.small and not torch.cuda.is_available():
        print("figures.py: no CUDA device, nothing can be measured", file=sys.stderr)
        return 2
    if args.small:
        print("# A TRIAL on a CPU, with small sizes: these numbers say nothing about a GPU.", flush=True)
    end_in_order()
    found: dict[str, Target] = {}
    failed = []
    for name in args.only:
        began = time.monotonic()
        limit_s = LIMITS_S[name] * (PATIENCE if args.small else 1)
        ended = run(name, limit_s, found, small=args.small)
        print(f"# {name}: {ended}, {time.monotonic() - began:.0f} s of {limit_s:.0f}", flush=True)
        if ended != "done":
            failed.append(f"{name}: {ended}")
    if args.record:
        record("gpu", report(found, failed), args)
    return 1 if failed else 0


def run(name: str, limit_s: float, found: dict[str, Target], *, small: bool) -> str:
    """Run one part, and print its figures as they come. Returns how it ended."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *OPTIONS.get(name, ())]
    command += ["--small"] * small
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = threading.Timer(limit_s, process.terminate)
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{"):
                _found(Target(**json.loads(line)), found, small=small)
            else:
                print(line, end="", flush=True)
        code = process.wait(ENDING_S)
    finally:
        late = timer.finished.is_set()
        timer.cancel()
        end(process)
    return "cut off" if late else "done" if code == 0 else f"exit code {code}"


def _found(figure: Target, found: dict[str, Target], *, small: bool) -> None:
    if found.get(figure.name) != figure:  # what is asked of a GPU is not asked of a trial
        print(f"trial: {figure.name}: {figure.measured}" if small else in_one_line(figure), flush=True)
    found[figure.name] = figure


def in_one_line(figure: Target) -> str:
    """With what was asked, if anything was."""
    judged = {None: "", True: f" (asked {figure.limit}: met)", False: f" (asked {figure.limit}: MISSED)"}
    return f"{figure.name}: {figure.measured}{judged[figure.met]}"


def end(process: subprocess.Popen[str]) -> None:
    """End a part, and what it has started."""
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def report(found: dict[str, Target], failed: list[str]) -> str:
    """All figures as Markdown."""
    intro = (
        f"One {torch.cuda.get_device_name()}; workers that train together share it, over NCCL and sockets."
    )
    missing = f"\n\nNot complete: {'; '.join(failed)}." if failed else ""
    return f"{intro}\n\n{target_table([*found.values()])}{missing}"


if __name__ == "__main__":
    sys.exit(main())
