"""Seeded orders of failures against the recovery protocol and the real core of a worker, all kinds of jobs.

Each order is one simulated run to its end, with all invariants checked after each event: whatever is lost,
frozen or broken, and when. What is asked: 100,000 orders in three minutes on two cores, and no violation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.testing.simulation.seeds import JobKind

_ASKED, _MINUTES = 100_000, 3.0
_WITH_HEADS = frozenset({JobKind.PIPELINE, JobKind.REPLICATED, JobKind.STAGED, JobKind.MEMORY})
"""Kinds of which half of the orders let events travel through heads."""


@dataclass(frozen=True)
class Sweep:
    """Orders of one kind of job.

    Attributes:
        kind: of the job.
        heads: events travel through heads.
        summary: of the command.
    """

    kind: JobKind
    heads: bool
    summary: dict[str, Any]


def main() -> int:
    """Run all, and print the report. Returns 1 after a violation."""
    parser = argument_parser(__doc__, repetitions=1)
    parser.add_argument("--orders", type=int, default=_ASKED, help="in all, default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="processes, default: %(default)s")
    args = parser.parse_args()
    sweeps = [
        (kind, heads) for kind in JobKind for heads in (False, True) if not heads or kind in _WITH_HEADS
    ]
    began = time.monotonic()
    found = []
    for number, (kind, heads) in enumerate(sweeps):
        seeds = args.orders * (number + 1) // len(sweeps) - args.orders * number // len(sweeps)
        found.append(Sweep(kind, heads, run(kind, heads, args.first_seed, seeds, args.jobs)))
        print(f"# {kind}: {len(found[-1].summary['violations'])} violations", file=sys.stderr, flush=True)
    body = report(found, (time.monotonic() - began) / 60)
    well = not any(one.summary["violations"] for one in found)
    return finish("orders", body, {"sweeps": [one.summary for one in found]}, args, well=well)


def run(kind: JobKind, heads: bool, first: int, seeds: int, jobs: int) -> dict[str, Any]:
    """The summary of some seeds."""
    command = [sys.executable, "-m", "swift_ft.testing.simulation", "--json", f"--job={kind}", "--shape=4x1"]
    command += [f"--first-seed={first}", f"--seeds={seeds}", f"--jobs={jobs}", *["--heads"] * heads]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


def report(found: list[Sweep], minutes: float) -> str:
    """The tables."""
    rows, seen = [], Counter[str]()
    for one in found:
        summary = one.summary
        counts = Counter(summary["seen"])
        seen += counts
        faults = sum(count for name, count in counts.items() if name.startswith("fault: "))
        rows.append(
            [
                f"{one.kind}{', heads' * one.heads}",
                str(summary["seeds"]),
                str(faults),
                str(counts["finished"]),
                str(counts["gave up"]),
                str(len(summary["violations"])),
                f"{1e3 * summary['cpu_s'] / summary['seeds']:.1f} ms",
            ]
        )
    orders = sum(one.summary["seeds"] for one in found)
    violations = [text.splitlines()[-1] for one in found for text in one.summary["violations"].values()]
    targets = [
        Target("orders", f">= {_ASKED}", str(orders), orders >= _ASKED),
        Target("violations", "0", str(len(violations)), not violations),
        Target("minutes", f"<= {_MINUTES:g}", f"{minutes:.1f}", minutes <= _MINUTES),
    ]
    head = [
        "jobs of four machines",
        "orders",
        "faults",
        "finished",
        "gave up for a good reason",
        "violations",
        "CPU",
    ]
    notes = "\n".join(f"- {text}" for text in violations)
    return "\n\n".join([table(head, rows), *([notes] if notes else []), target_table(targets)])


if __name__ == "__main__":
    sys.exit(main())
