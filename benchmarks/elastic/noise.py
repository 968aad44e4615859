"""Counts false alarms about slow machines, while whatever else is there makes noise.

    python -m benchmarks.elastic.noise --minutes 60

Three jobs train at once on equal devices, with light work (scripts/noisy_steps.py) and ``--stragglers warn``:
a LayerStack of three machines, a pipeline of two plain stages, and two replicas in DDP. None of their
machines is slow, so each worker that is named is looked at. The alarm is false unless the layers of that
worker took at least the factor of an alarm times as long as those of its fastest peer in the five seconds
before, each compared with its own median of the whole job. Then other load sat on its core, and it was slow.

Each job is begun anew several times, since what is expected of a worker is measured in its first iterations.
The noise is not made here: run it beside other work, and see the load average that it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.results import Target, argument_parser, finish, run_benchmark, table, target_table
from examples.commands import CommandError, started, swift_run

SCRIPT = Path(__file__).parent / "scripts" / "noisy_steps.py"
WAYS = {"stack": 3, "plain": 2, "ddp": 2}
"""Machines of each job."""
FACTOR, BEFORE_S = 1.5, 5.0
POLL_S, END_S = 5.0, 60.0
Steps = dict[int, tuple[float, float, float]]
"""Of a worker, by iteration: when it ended, how long its layers took, and how long it waited for a core."""


def main() -> int:
    """Train, count, print."""
    parser = argument_parser(__doc__, repetitions=4)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all jobs one after the other")
    parser.add_argument("--keep", type=Path, help="a folder for what the jobs wrote, to look at alarms")
    args = parser.parse_args()
    loads = [os.getloadavg()[0]]
    rows: list[list[str]] = []
    alarms: list[dict[str, Any]] = []
    for number in range(args.repetitions):
        with tempfile.TemporaryDirectory(prefix="swift-noise-") as name:
            folder = args.keep / str(number + 1) if args.keep else Path(name)
            found, seen = trained(60 * args.minutes / args.repetitions, folder)
        loads += seen
        for way, (iterations, slow, own) in found.items():
            rows.append([way, str(number + 1), str(iterations), f"{slow:.2f}", str(len(own))])
            alarms += [{"job": number + 1, "way": way, **alarm} for alarm in own]
            print(f"# {rows[-1]} {own}", file=sys.stderr, flush=True)
    false = [alarm for alarm in alarms if alarm["took"] < FACTOR]
    named = f"false alarms in {args.minutes:g} minutes of three jobs"
    jobs = ", ".join(f"{machines} machines ({way})" for way, machines in WAYS.items())
    body = (
        f"Jobs of {jobs} at once, begun {args.repetitions} times. Load average {min(loads):.1f} to "
        f"{max(loads):.1f}, median {statistics.median(loads):.1f}. Alarms: {len(alarms)}, of which "
        f"{len(alarms) - len(false)} name a worker whose layers did take that long.\n\n"
        f"{table(['', 'job', 'iterations', 'longest / median iteration', 'alarms'], rows)}\n\n"
        f"{target_table([Target(named, '0', str(len(false)), not false)])}"
    )
    return finish("noise", body, {"loads": loads, "alarms": alarms}, args)


def trained(
    seconds: float, folder: Path
) -> tuple[dict[str, tuple[int, float, list[dict[str, Any]]]], list[float]]:
    """All jobs at once for a while: iterations, the longest one, and alarms of each; and load averages."""
    loads = []
    with contextlib.ExitStack() as stack:
        folders = {way: folder / way for way in WAYS}
        running = {}
        for way, machines in WAYS.items():
            folders[way].mkdir(parents=True)
            flags = ["--machines", str(machines), "--spares", "0", "--stragglers", "warn"]
            flags += ["--straggler-factor", str(FACTOR), "--events-out", str(folders[way] / "events.json")]
            script = [str(SCRIPT), "--store", str(folders[way] / "store"), "--way", way]
            script += ["--out", str(folders[way] / "steps")]
            output = folders[way] / "output.txt"
            running[way] = stack.enter_context(
                started(swift_run(*flags, *script), output, OMP_NUM_THREADS="1")
            )
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, POLL_S))
            loads.append(os.getloadavg()[0])
            for way, process in running.items():
                if process.poll() is not None:
                    raise CommandError(
                        f"{way} has ended:\n{(folders[way] / 'output.txt').read_text()[-2000:]}"
                    )
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait(END_S)
        return {way: judged(folders[way], machines) for way, machines in WAYS.items()}, loads


def judged(folder: Path, machines: int) -> tuple[int, float, list[dict[str, Any]]]:
    """Iterations of a job, its longest one by its median, and its alarms, with what is known of each."""
    steps = [_steps(folder / f"steps{rank}.jsonl") for rank in range(machines)]
    report = json.loads((folder / "events.json").read_text())
    if report["recoveries"]:
        raise CommandError(f"a job lost a machine: {report['recoveries']}")
    noted = [
        event for event in report["events"] if event["event"] == "PaceNoted" and event["permille"] > 1000
    ]
    took = [took for _, took, _ in steps[0].values()]
    longest = max(took) / statistics.median(took)
    return len(took), longest, [_examined(event, steps) for event in noted]


def _steps(path: Path) -> Steps:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
    return {index: (at, took, waited) for index, at, took, waited in lines}


def _examined(event: Mapping[str, Any], steps: Sequence[Steps]) -> dict[str, Any]:
    """An alarm, and how long the worker's layers took then by what its fastest peer's did."""
    rank = event["rank"]
    end = steps[rank][event["iteration"] - 1][0]

    def recent(own: Steps) -> list[tuple[float, float, float]]:
        before = [one for one in own.values() if one[0] <= end]
        return [one for one in before if end - BEFORE_S <= one[0]] or before[-1:]

    def slowness(own: Steps) -> float:
        now = statistics.median(took for _, took, _ in recent(own))
        return now / statistics.median(took for _, took, _ in own.values())

    peers = min(slowness(own) for other, own in enumerate(steps) if other != rank)
    waited = [statistics.fmean(waited for _, _, waited in recent(own)) for own in steps]
    return {
        "rank": rank,
        "iteration": event["iteration"],
        "noted": event["permille"] / 1000,
        "took": round(slowness(steps[rank]) / peers, 2),
        "waited for a core, s": [round(one, 4) for one in waited],
    }


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
