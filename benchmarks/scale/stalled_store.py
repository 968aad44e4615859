"""What a step takes while the rendezvous store is frozen, against while it answers: nothing fails.

One run, in phases: the store's process is stopped in every other one (SIGSTOP). Checkpoints are saved in all
of them. A ratio is that of a stalled phase and the mean of the healthy ones before and after it: wall time,
and CPU time of all workers. Medians of the ratios over all repetitions, and their range.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
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

SCRIPT = Path(__file__).parent / "scripts" / "freezes_store.py"
MACHINES = 2
WARM_UP, STEPS = 12, 20
CHECKPOINT_EVERY = 10
LIMIT = 1.00
NOISE = 0.02
"""Around 1.00: what two phases differ in without any cause."""


@dataclass(frozen=True)
class Phase:
    """Mean seconds of a step."""

    stalled: bool
    wall_s: float
    cpu_s: float


def main() -> int:
    """Runs the training and prints the report."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument("--phases", type=int, default=9, help="of a run, an odd number, default: %(default)s")
    args = parser.parse_args()
    runs: list[list[Phase]] = []
    for repetition in range(args.repetitions):
        runs.append(phases := measure(args.phases))
        text = ", ".join(f"{wall:.3f}" for wall, _ in ratios_of(phases))
        print(f"# {repetition + 1}: stalled / healthy {text}", file=sys.stderr, flush=True)
    ratios = [ratio for phases in runs for ratio in ratios_of(phases)]
    wall, cpu = (Summary.of([ratio[of] for ratio in ratios]) for of in (0, 1))
    met = wall.median <= LIMIT + NOISE
    measured = f"{wall.text('')}, CPU {cpu.text('')}"
    targets = [Target("step time, stalled store / healthy", f"<= {LIMIT:.2f}", measured, met)]
    body = report(runs, targets)
    return finish("stalled-store", body, {"phases": runs, "summary": {"wall": wall, "cpu": cpu}}, args)


def measure(phases: int) -> list[Phase]:
    """One run: healthy, stalled, healthy, ..."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder = Path(name)
        told = {"warm_up": WARM_UP, "steps": STEPS, "folder": name}
        total = WARM_UP + phases * STEPS + 1
        script = [str(SCRIPT), "--iterations", str(total), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        command = swift_run("--machines", str(MACHINES), *script, "--store", str(folder / "store"))
        finished(command, folder / "output.txt", within_s=1800, OMP_NUM_THREADS="1", PHASES=json.dumps(told))
        times = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(MACHINES)]
    found = []
    for phase in range(phases):
        begin, end = (WARM_UP + number * STEPS for number in (phase, phase + 1))
        wall = times[0][end][0] - times[0][begin][0]
        cpu = sum(of_worker[end][1] - of_worker[begin][1] for of_worker in times)
        found.append(Phase(bool(phase % 2), wall / STEPS, cpu / STEPS))
    return found


def ratios_of(phases: list[Phase]) -> list[tuple[float, float]]:
    """By stalled phase, its step against its neighbours': wall time and CPU time."""
    found = []
    for number in range(1, len(phases) - 1, 2):
        before, stalled, after = phases[number - 1 : number + 2]
        wall, cpu = (before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2
        found.append((stalled.wall_s / wall, stalled.cpu_s / cpu))
    return found


def report(runs: list[list[Phase]], targets: list[Target]) -> str:
    """All results as Markdown."""
    rows = []
    for words, stalled in (("healthy", False), ("stalled", True)):
        of = [phase for phases in runs for phase in phases if phase.stalled == stalled]
        wall, cpu = Summary.of([p.wall_s for p in of]), Summary.of([p.cpu_s for p in of])
        rows.append([words, wall.text(digits=4), cpu.text(digits=4)])
    intro = (
        f"The GPT of `examples/` on {MACHINES} machines, a checkpoint every {CHECKPOINT_EVERY} iterations. "
        f"In one run, phases of {STEPS} steps in which the rendezvous store's process is stopped alternate "
        f"with phases in which it answers; {len(runs)} runs of {len(runs[0])} phases, medians (ranges). "
        f"1.00 is met within {NOISE:.0%}."
    )
    head = ["store", "a step", "CPU time of all workers"]
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
