"""What auditing spares cost and find: a recovery with one that audits, and intervals in which all was right.

    python -m benchmarks.recovery.audits

A pipeline of three machines has one spare. In turns it audits or only waits, and a machine is killed at the
same place: the time from the kill until all train again. Runs in which no audit was under way at that moment
are told apart, and do not count.

Then a pipeline trains undisturbed for a while, with short intervals, which the spare audits: each audit is
one machine and one interval, and none may find a difference.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    run_benchmark,
    table,
    target_table,
)
from examples.commands import EXAMPLES, finished, swift_run

MACHINES = 3
SMALL = ("--layers=4", "--width=64", "--heads=2", "--sequence=64", "--microbatches=4")
EVERY, LOST_IN = 40, 46
"""The checkpoint with which an audit begins, and the iteration of the kill: the audit takes longer."""
_WORSE = 1.1

Run = dict[str, Any]
"""What ``--events-out`` has of a run."""


def main() -> int:
    """Measure, and print the report. Returns 1 if somebody was named in a clean run."""
    parser = argument_parser(__doc__, repetitions=5)
    parser.add_argument(
        "--iterations",
        type=int,
        default=1200,
        help="of the clean run, default: %(default)s; a checkpoint, and so an interval, is each fourth",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swift-audits-") as folder:
        times, idle = lose_a_machine(Path(folder), args.repetitions)
        clean = _run(Path(folder) / "clean", audits=True, every=4, iterations=args.iterations)
    named = _differences(clean)
    body = report(times, idle, clean)
    facts = {"audited": times[True], "waiting": times[False], "differences": named}
    return finish("audits", body, facts, args, well=not named)


def lose_a_machine(place: Path, repetitions: int) -> tuple[dict[bool, list[float]], int]:
    """Seconds from a kill until all train, by whether the spare audited, and runs in which it did not."""
    times: dict[bool, list[float]] = {True: [], False: []}
    idle = 0
    for number in range(repetitions):
        for audits in (True, False) if number % 2 else (False, True):
            run = _run(
                place / f"{number}-{audits}", audits=audits, every=EVERY, iterations=60, lost_in=LOST_IN
            )
            if audits and not _under_way(run):
                idle += 1
                continue
            (recovery,) = run["recoveries"]
            times[audits].append(recovery["live"] - _killed_at(run))
    return times, idle


def _run(folder: Path, *, audits: bool, every: int, iterations: int, lost_in: int = 0) -> Run:
    folder.mkdir()
    out = folder / "events.json"
    flags = ["--machines", str(MACHINES), "--spares", "1", "--events-out", str(out), *["--audit"] * audits]
    if lost_in:
        flags += ["--inject", f"kill machine=1 iteration={lost_in} point=backward"]
    script = [str(EXAMPLES / "train_swift.py"), *SMALL, f"--store={folder / 'store'}"]
    script += [f"--checkpoint-every={every}", f"--iterations={iterations}"]
    finished(swift_run(*flags, *script), folder / "output")
    told: Run = json.loads(out.read_text())
    return told


def _under_way(run: Run) -> bool:
    """Whether an audit had begun, and had not ended, when the machine was lost."""
    names = [event["event"] for event in run["events"]]
    before = names[: names.index("MachineLost")]
    return before.count("AuditBegun") > before.count("AuditEnded")


def _killed_at(run: Run) -> float:
    return next(float(event["at"]) for event in run["events"] if event["event"] == "FaultInjected")


def _audits(run: Run) -> list[dict[str, Any]]:
    return [event for event in run["events"] if event["event"] == "AuditEnded"]


def _differences(run: Run) -> int:
    """Audits that have found a worker's work to be another than its own."""
    return sum(audit.get("iteration") is not None for audit in _audits(run))


def report(times: Mapping[bool, Sequence[float]], idle: int, clean: Run) -> str:
    """The tables."""
    rows = []
    for audits, name in ((False, "only waits"), (True, "audits")):
        found = Summary.of(times[audits]) if times[audits] else None
        rows.append([name, str(len(times[audits])), found.text() if found is not None else "none"])
    audited = sum(len(audit["slots"]) for audit in _audits(clean))
    named = _differences(clean)
    ratio = Summary.of(times[True]).median / Summary.of(times[False]).median if all(times.values()) else None
    targets = [
        Target(
            "kill to live with a spare that audits / that waits",
            f"<= {_WORSE:g}",
            "not measured" if ratio is None else f"{ratio:.3f}",
            ratio is not None and ratio <= _WORSE,
        ),
        Target("clean intervals of a machine that were audited", ">= 1000", str(audited), audited >= 1000),
        Target("machines named in them", "0", str(named), named == 0),
    ]
    about = (
        f"{MACHINES} machines and a spare; a machine is killed in iteration {LOST_IN}, {LOST_IN - EVERY} "
        f"after a checkpoint. In {idle} runs no audit was under way then; they do not count."
    )
    return "\n\n".join([about, table(["the spare", "runs", "kill to live"], rows), target_table(targets)])


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
