"""Measures pipelines that are replicas: what they cost without a failure, and what is left after losses.

    python -m benchmarks.elastic.replicas

1. Two pipelines of the GPT of the examples, of two workers each: DDP around plain stages under torchrun,
   without any protection, against a LayerStack whose second pipeline is cut otherwise, and with exact=True.
2. Two pipelines of three machines each, of layers that take their time without computing
   (scripts/slept_layers.py), so that two cores can stand for six devices. One machine gets SIGKILL, and no
   other one comes. Microbatches go to the other pipeline, then layers move. 5/6 of the speed would be ideal.
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
    append_results,
    argument_parser,
    machine,
    table,
    target_table,
)
from examples.commands import CommandError, finished, swift_run

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SLEPT = SCRIPTS / "replicated_steps.py", SCRIPTS / "slept_layers.py"
WORKERS, ITERATIONS, WARM_UP = 4, 40, 15
WAYS = ("ddp", "unlike", "exact")
AT_MOST = {"unlike": 1.02, "exact": 1.05}
MACHINES, LOST_AT, LONG, COUNTED = 6, 16, 60, 20
IDEAL = (MACHINES - 1) / MACHINES
WITHIN_S = 300.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=6)
    args = parser.parse_args()
    wall: dict[str, list[float]] = {way: [] for way in AT_MOST}
    cpu: dict[str, list[float]] = {way: [] for way in AT_MOST}
    left: list[dict[str, float]] = []
    try:
        for number in range(args.repetitions):
            found = {way: steps(way) for way in (WAYS if number % 2 else WAYS[::-1])}
            for way in AT_MOST:
                wall[way].append(found[way][0] / found["ddp"][0])
                cpu[way].append(found[way][1] / found["ddp"][1])
            left.append(after_loss(number % MACHINES))
            print(f"# {number + 1}: {[r[-1] for r in wall.values()]}, {left[-1]}", file=sys.stderr)
    except CommandError as error:
        print(f"replicas.py: {error}", file=sys.stderr)
        return 1
    targets = [
        Target(
            f"a step with {'exact=True' if way == 'exact' else 'unlike cuts'} / with DDP, {what}",
            f"<= {AT_MOST[way]}",
            Summary.of(ratios[way]).text(""),
            Summary.of(ratios[way]).median <= AT_MOST[way],
        )
        for way in AT_MOST
        for what, ratios in (("wall time", wall), ("CPU time of all workers", cpu))
    ]
    keys = ("hosted", "rerouted", "recut")
    summaries = {key: Summary.of([one[key] for one in left if key in one]) for key in keys}
    names = {
        "hosted": "at once: a machine does the work of two",
        "rerouted": "microbatches go to the other pipeline",
        "recut": "layers have moved, too",
    }
    rows = [[names[key], summaries[key].text(""), f"{summaries[key].median / IDEAL:.3f}"] for key in keys]
    body = (
        f"Two pipelines, 1F1B, {args.repetitions} repetitions in turn. Speed after the loss of one machine "
        f"of six, as a share of that before; {IDEAL:.3f} would be ideal. torchft goes on without the "
        "pipeline that has lost a machine: with half of the speed and of the batch (not measured here).\n\n"
        f"{table(['', 'speed left', 'of the ideal'], rows)}\n\n{target_table(targets)}"
    )
    print(json.dumps({"machine": machine(), "wall": wall, "cpu": cpu, "left": left}) if args.json else body)
    if args.update:
        append_results("Pipelines that are replicas", body)
    return 0


def steps(way: str) -> tuple[float, float]:
    """Seconds of a step, and of the CPU time of all workers' steps."""
    with tempfile.TemporaryDirectory(prefix="swift-replicas-") as name:
        folder = Path(name)
        script = [str(STEPS), "--way", way, "--out", str(folder / "steps.json")]
        script += ["--iterations", str(ITERATIONS)]
        if way == "ddp":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node", str(WORKERS), *script]
        else:
            flags = ["--machines", str(WORKERS), "--spares", "0", "--helpers", "0"]
            command = swift_run(*flags, *script, "--store", str(folder / "store"))
        finished(command, folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = [json.loads((folder / f"steps{rank}.json").read_text()) for rank in range(WORKERS)]
    wall = statistics.median(step[0] for step in times[0][WARM_UP:])
    return wall, sum(statistics.median(step[1] for step in own[WARM_UP:]) for own in times)


def after_loss(lost: int) -> dict[str, float]:
    """The speed after a loss, as a share of that before: hosted, with other shares, with other cuts."""
    with tempfile.TemporaryDirectory(prefix="swift-replicas-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--no-replacement", "--elastic-wait", "0", "--spares", "0"]
        flags += ["--events-out", str(folder / "events.json")]
        flags += ["--inject", f"kill machine={lost} iteration={LOST_AT} point=forward"]
        script = [str(SLEPT), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(LONG), "--pipelines", "2"]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = json.loads((folder / f"steps{int(lost == 0)}.json").read_text())["times"]
        report = json.loads((folder / "events.json").read_text())
    shared = [e["iteration"] for e in report["events"] if e["event"] == "SharesRequested"]
    moved = [change["iteration"] for change in report["layouts"]]
    before = statistics.median(s for index, s in times if 8 <= index < LOST_AT)
    spans = {
        "hosted": range(LOST_AT + 1, min([*shared, *moved])),
        "rerouted": range(min(shared) + 1, min(moved)),
        "recut": range(LONG - COUNTED, LONG),
    }
    return {
        key: before / statistics.median(found)
        for key, span in spans.items()
        if (found := [s for index, s in times if index in span])
    }


if __name__ == "__main__":
    sys.exit(main())
