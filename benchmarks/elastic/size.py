"""Compares what swift-plan size says of 1 to 4 machines with runs on as many.

    python -m benchmarks.elastic.size

A short run of four machines measures the layers (``--layers-out``) and its iterations. From that alone the
time of an iteration on one to four machines is predicted, and then measured. The ten unlike layers take their
time without computing (scripts/slept_layers.py), so that two cores can stand for four devices.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
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
from swift_ft.costs.layer_profile import LayerProfile, read_layers
from swift_ft.planning.layout.sizing import MachineKind, Work, sizes

SCRIPT = Path(__file__).parent / "scripts" / "slept_layers.py"
MOST, BATCH, MICROBATCHES, ITERATIONS, WARM_UP = 4, 16, 8, 24, 8
WITHIN = 0.10
WITHIN_S = 300.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=3)
    args = parser.parse_args()
    rows, ratios = [], []
    kind = MachineKind("this kind", MOST)
    for number in range(args.repetitions):
        profiled_s, layers = run_on(MOST)
        work = Work(layers, BATCH, MICROBATCHES, pipelines=1)
        overhead_s = max(0.0, profiled_s - sizes(work, kind)[-1].iteration_s)
        for size in sizes(replace(work, overhead_s=overhead_s), kind):
            took_s, _ = run_on(size.machines)
            ratios.append(took_s / size.iteration_s)
            times = [f"{seconds:.3f} s" for seconds in (size.iteration_s, took_s)]
            rows.append([str(number + 1), str(size.machines), *times, f"{ratios[-1]:.3f}"])
            print(f"# {rows[-1]}", file=sys.stderr)
    target = Target(
        "an iteration of 1 to 4 machines / what swift-plan size says",
        f"1 ± {WITHIN:.2f}",
        Summary.of(ratios).text(""),
        max(abs(ratio - 1) for ratio in ratios) <= WITHIN,
    )
    body = (
        f"Ten layers of 4 to 12 ms forward and twice that backward, {MICROBATCHES} microbatches, 1F1B, one "
        f"pipeline. Medians of {ITERATIONS - WARM_UP} iterations.\n\n"
        f"{table(['repetition', 'machines', 'forecast', 'measured', 'ratio'], rows)}\n\n"
        f"{target_table([target])}"
    )
    return finish("machine-count", body, {"ratios": ratios}, args)


def run_on(machines: int) -> tuple[float, tuple[LayerProfile, ...]]:
    """Seconds of an iteration on so many machines, and what each layer took."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name:
        folder = Path(name)
        flags = ["--machines", str(machines), "--spares", "0", "--layers-out", str(folder / "layers.json")]
        script = [str(SCRIPT), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(ITERATIONS)]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = json.loads((folder / "steps0.json").read_text())["times"]
        return statistics.median(s for _, s in times[WARM_UP:]), read_layers(folder / "layers.json")


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
