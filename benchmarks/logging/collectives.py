"""The cost of logging what a script communicates in its steps: a norm, a loss, statistics, a few objects.

In one run, blocks of iterations in which the results of the script's collectives are logged alternate with
blocks in which they are not. Messages between stages are logged in both. A ratio is that of two neighbouring
blocks' median iteration times; the median of all, and the range in parentheses.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    run_benchmark,
    table,
    target_table,
)
from examples.commands import finished, swift_run

SCRIPT = Path(__file__).parent / "scripts" / "communicates.py"
KINDS = {"small results only": 1, "and 256 KiB": 1 << 16, "and 1 MiB": 1 << 18}
"""By what a step communicates: the number of floats in its large result."""
LIMIT = 1.01
WARM_UP = 2
"""Blocks that do not count."""


def main() -> int:
    """Runs each kind and prints the report."""
    parser = argument_parser(__doc__, repetitions=20)
    parser.add_argument("--block", type=int, default=10, help="iterations in a block, default: %(default)s")
    args = parser.parse_args()
    found = {kind: measure(floats, args.repetitions, args.block) for kind, floats in KINDS.items()}
    body = report(found, args.repetitions, args.block)
    return finish("script-collectives", body, {"results": found}, args)


def measure(floats: int, repetitions: int, block: int) -> dict[str, Summary]:
    """Iteration times with and without logging, and their ratios, in one run."""
    iterations = (WARM_UP + 2 * repetitions) * block
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder = Path(name)
        script = (str(SCRIPT), "--iterations", str(iterations), "--block", str(block))
        places = ("--store", str(folder / "store"), "--out", str(folder / "ends.json"))
        command = swift_run("--machines", "4", *script, "--floats", str(floats), *places)
        finished(command, folder / "output.txt")
        ends: list[float] = json.loads((folder / "ends.json").read_text())
    return ratios([after - before for before, after in itertools.pairwise(ends)], block)


def ratios(times: Sequence[float], block: int) -> dict[str, Summary]:
    """From the times of all iterations but the first one. In every second block, results were logged."""
    counted = times[WARM_UP * block - 1 :]
    medians = [statistics.median(counted[at : at + block]) for at in range(0, len(counted), block)]
    pairs = [*zip(medians[::2], medians[1::2], strict=True)]
    return {
        "logged": Summary.of([one for one, _ in pairs]),
        "unlogged": Summary.of([other for _, other in pairs]),
        "ratio": Summary.of([one / other for one, other in pairs]),
    }


def report(found: dict[str, dict[str, Summary]], repetitions: int, block: int) -> str:
    """All results as Markdown."""
    rows = [
        [kind, of["logged"].text(digits=4), of["unlogged"].text(digits=4), of["ratio"].text("")]
        for kind, of in found.items()
    ]
    ratios = {f"a step with logged collectives, {kind}": of["ratio"] for kind, of in found.items()}
    targets = [
        Target(step, f"<= {LIMIT}", ratio.text(""), ratio.median <= LIMIT) for step, ratio in ratios.items()
    ]
    intro = (
        "Iteration time of the GPT of `examples/` (four stages on four machines, gloo, 1F1B), whose script "
        "sums up a norm, broadcasts a loss, and gathers objects in each step. "
        f"{repetitions} blocks of {block} iterations with logging alternate with as many without; medians "
        "(ranges)."
    )
    head = ["the script communicates", "logged", "not logged", "ratio"]
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
