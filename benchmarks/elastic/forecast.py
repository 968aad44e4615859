"""Compares what session.plan() says of a job with one machine less with what then happens.

    python -m benchmarks.elastic.forecast

Four machines train ten unlike layers that take their time without computing (scripts/slept_layers.py), so
that two cores can stand for four devices. One machine gets SIGKILL, and no other one comes. Before, the
workers have asked for the plan: how long an iteration would take when another machine runs the lost worker,
too, and then, once the layers are shared anew.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
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

SCRIPT = Path(__file__).parent / "scripts" / "slept_layers.py"
MACHINES, LOST_AT, ITERATIONS, COUNTED = 4, 16, 50, 20
WITHIN = 0.10
WITHIN_S = 300.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=4)
    args = parser.parse_args()
    rows, ratios = [], []
    for number in range(args.repetitions):
        lost = number % MACHINES
        found = loss_of(lost)
        ratios.append(found["then"] / found["forecast"])
        texts = [f"{found[key]:.3f} s" for key in ("now", "hosted", "forecast", "then")]
        rows.append([str(lost), *texts, f"{ratios[-1]:.3f}", f"{found['moves']:g}"])
        print(f"# {rows[-1]}", file=sys.stderr)
    worst = max(abs(ratio - 1) for ratio in ratios)
    target = Target(
        "an iteration of 3 machines / its forecast, of 4 losses",
        f"1 ± {WITHIN:.2f}",
        Summary.of(ratios).text(""),
        worst <= WITHIN,
    )
    heads = ["lost", "before", "forecast: hosted", "forecast: shared", "measured", "ratio", "moves"]
    body = (
        "Ten layers of 4 to 12 ms forward and twice that backward, 8 microbatches, 1F1B. What is measured is "
        f"the median of the last {COUNTED} iterations of {ITERATIONS}.\n\n"
        f"{table(heads, rows)}\n\n{target_table([target])}"
    )
    return finish("smaller-forecast", body, {"ratios": ratios}, args)


def loss_of(lost: int) -> dict[str, float]:
    """Seconds of an iteration: before, as forecast, and measured."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--no-replacement", "--elastic-wait", "0", "--spares", "0"]
        flags += ["--events-out", str(folder / "events.json"), "--helpers", "0"]
        flags += ["--inject", f"kill machine={lost} iteration={LOST_AT} point=forward"]
        script = [str(SCRIPT), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(ITERATIONS)]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        survivor = int(lost == 0)
        found = json.loads((folder / f"steps{survivor}.json").read_text())
        report = json.loads((folder / "events.json").read_text())
    plan = found["plan"]["machines"][lost]
    before = [seconds for index, seconds in found["times"] if 8 <= index < LOST_AT]
    after = [seconds for _, seconds in found["times"][-COUNTED:]]
    return {
        "now": statistics.median(before),
        "hosted": plan["hosted_s"],
        "forecast": plan["shared_s"],
        "then": statistics.median(after),
        "moves": len(report["layouts"]),
    }


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
