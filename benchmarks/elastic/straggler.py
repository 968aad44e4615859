"""Measures how soon a slow machine is found, and what it costs before and after layers moved away from it.

    python -m benchmarks.elastic.straggler

Four machines train ten unlike layers that take their time without computing (scripts/slept_layers.py). From
one iteration on, one machine takes three times as long. ``--stragglers rebalance`` moves layers away from it.
What an iteration then takes is compared with what the schedule makes of the layers' measured costs, the pace
that was noted, and the layout that was chosen.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
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
from examples.commands import CommandError, finished, swift_run
from swift_ft.costs.layer_profile import LayerProfile, read_layers
from swift_ft.costs.shared_machines import parts
from swift_ft.planning.layout.makespan import StageTime, makespan_ns
from swift_ft.recovery.layout.stage_layers import even_layout

SCRIPT = Path(__file__).parent / "scripts" / "slept_layers.py"
MACHINES, MICROBATCHES, SLOW_FROM, TIMES, ITERATIONS, COUNTED = 4, 8, 16, 3, 70, 20
WITHIN_ITERATIONS, WITHIN = 20, 0.15
WITHIN_S = 300.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=4)
    args = parser.parse_args()
    rows, ratios, found_after = [], [], []
    for number in range(args.repetitions):
        slow = number % MACHINES
        found = slowed(slow)
        ratios.append(found["then"] / found["forecast"])
        found_after.append(found["found_after"])
        texts = [f"{found[key]:.3f} s" for key in ("now", "slow", "forecast", "then")]
        rows.append([str(slow), f"{found['found_after']:g}", *texts, f"{ratios[-1]:.3f}"])
        print(f"# {rows[-1]}", file=sys.stderr)
    targets = (
        Target(
            "a machine slowed to a third is found, iterations",
            f"<= {WITHIN_ITERATIONS}",
            Summary.of(found_after).text("", 0),
            max(found_after) <= WITHIN_ITERATIONS,
        ),
        Target(
            "an iteration after layers moved / its forecast",
            f"1 ± {WITHIN:.2f}",
            Summary.of(ratios).text(""),
            max(abs(ratio - 1) for ratio in ratios) <= WITHIN,
        ),
    )
    heads = ["slow", "found after", "before", "slow", "forecast", "measured", "ratio"]
    body = (
        f"Ten layers of 4 to 12 ms forward and twice that backward, {MICROBATCHES} microbatches, 1F1B. "
        f"Iterations are medians, the last of {COUNTED}.\n\n{table(heads, rows)}\n\n{target_table(targets)}"
    )
    return finish("slow-machine", body, {"ratios": ratios}, args)


def slowed(slow: int) -> dict[str, float]:
    """Seconds of an iteration: before, while a machine is slow, as forecast, and after layers moved."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--spares", "0", "--stragglers", "rebalance"]
        flags += ["--events-out", str(folder / "events.json"), "--layers-out", str(folder / "layers.json")]
        script = [str(SCRIPT), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(ITERATIONS), "--slow", str(slow), "--slow-from", str(SLOW_FROM)]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = json.loads((folder / "steps0.json").read_text())["times"]
        report = json.loads((folder / "events.json").read_text())
        layers = read_layers(folder / "layers.json")
    noted = [event for event in report["events"] if event["event"] == "PaceNoted"]
    if {event["rank"] for event in noted} != {slow} or not report["layouts"]:
        raise CommandError(
            f"machine {slow} was to be found, and layers to move: {noted}, {report['layouts']}"
        )
    before = statistics.median(s for i, s in times if SLOW_FROM // 2 <= i < SLOW_FROM)
    moved_at = report["layouts"][0]["iteration"]
    layout = tuple(report["layouts"][-1]["layers"])
    then_ns = _span_ns(layers, layout, {slow: noted[-1]["permille"]})
    now_ns = _span_ns(layers, even_layout(len(layers), MACHINES), {})
    return {
        "found_after": noted[0]["iteration"] - SLOW_FROM,
        "now": before,
        "slow": statistics.median(s for i, s in times if SLOW_FROM < i < moved_at),
        "forecast": before + (then_ns - now_ns) / 1e9,
        "then": statistics.median(s for _, s in times[-COUNTED:]),
    }


def _span_ns(layers: Sequence[LayerProfile], layout: tuple[int, ...], paces: dict[int, int]) -> int:
    stages = []
    for number, own in enumerate(parts(layers, layout)):
        pace: Any = paces.get(number, 1000)
        forward, backward = (sum(getattr(one, name) for one in own) for name in ("forward_ns", "backward_ns"))
        stages.append(StageTime(forward * pace // 1000, backward * pace // 1000))
    return makespan_ns(stages, MICROBATCHES)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
