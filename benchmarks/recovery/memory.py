"""Measures memory checkpoints: their cost per iteration, and a recovery against torchrun with DCP.

    python -m benchmarks.recovery.memory

A model sharded by FSDP2 on two machines with one worker each. Worker 1 gets SIGKILL 49 iterations after the
checkpoint in the store. The recovery lasts until worker 0 has completed the iteration in which that happened:
with memory checkpoints it repeats those since the last copy, and with torchrun all 49 in new processes.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.lib.results import Summary, Target, append_results, argument_parser, machine, table
from examples.commands import ROOT, CommandError, finished, swift_run, torchrun

SCRIPT = ROOT / "benchmarks" / "recovery" / "scripts" / "sharded.py"
CHECKPOINT_EVERY, LOST, EVERY, NEVER = 50, 49, 10, 1_000_000
UNDISTURBED, WARM_UP = 60, 10
OVERHEAD, FASTER = 1.02, 5.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument("--width", type=int, default=1024, help="of the model, default: %(default)s")
    args = parser.parse_args()
    ratios, ours, theirs = [], [], []
    try:
        for number in range(args.repetitions):
            pair = [iteration_s(every, args.width) for every in (EVERY, NEVER)]
            ratios.append(pair[0] / pair[1])
            ours.append(recovery_s("memory", args.width))
            theirs.append(recovery_s("dcp", args.width))
            print(f"# {number + 1}: {ratios[-1]:.3f}, {ours[-1]:.2f} s, {theirs[-1]:.2f} s", file=sys.stderr)
    except CommandError as error:
        print(f"memory.py: {error}", file=sys.stderr)
        return 1
    faster = Summary.of([their / our for our, their in zip(ours, theirs, strict=True)])
    overhead = Summary.of(ratios)
    targets = (
        Target(
            "an iteration with copies / without",
            f"<= {OVERHEAD}",
            overhead.text(""),
            overhead.median <= OVERHEAD,
        ),
        Target("torchrun's recovery / ours", f">= {FASTER}", faster.text(""), faster.median >= FASTER),
    )
    rows = [
        ["memory checkpoints", Summary.of(ours).text()],
        ["torchrun with DCP", Summary.of(theirs).text()],
    ]
    body = (
        f"FSDP2 on two workers, a copy every {EVERY} iterations, {LOST} iterations after a checkpoint in "
        f"the store. {args.repetitions} repetitions.\n\n{table(['recovery', 'takes'], rows)}\n\n"
        + table(["", "target", "measured"], [[t.name, t.limit, t.measured] for t in targets])
    )
    samples = {"overhead": ratios, "memory_s": ours, "torchrun_s": theirs}
    print(json.dumps({"machine": machine(), **samples}, indent=1) if args.json else body)
    if args.update:
        append_results("Memory checkpoints", body)
    return 0


def iteration_s(every: int, width: int) -> float:
    """Mean seconds of an iteration, copies included."""
    with tempfile.TemporaryDirectory(prefix="swift-memory-") as name:
        folder = Path(name)
        training = command(folder, "memory", width, UNDISTURBED, every)
        finished(training, folder / "output.txt", OMP_NUM_THREADS="1")
        ends = [at for _, at in read_ends(folder)][WARM_UP:]
        return statistics.mean(after - before for before, after in itertools.pairwise(ends))


def recovery_s(way: str, width: int) -> float:
    """Seconds from SIGKILL until worker 0 has completed the iteration in which it happened."""
    dies_in = CHECKPOINT_EVERY + LOST
    with tempfile.TemporaryDirectory(prefix="swift-memory-") as name:
        folder = Path(name)
        full = [*command(folder, way, width, dies_in + 3, EVERY), "--die", str(dies_in)]
        finished(full, folder / "output.txt", OMP_NUM_THREADS="1")
        died = float((folder / "died").read_text())
        return next(at for iteration, at in read_ends(folder) if iteration == dies_in) - died


def command(folder: Path, way: str, width: int, iterations: int, every: int) -> list[str]:
    """One training."""
    script = [str(SCRIPT), "--folder", str(folder), "--way", way, "--width", str(width)]
    script += ["--iterations", str(iterations), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    if way == "dcp":
        return torchrun("--nproc-per-node", "2", "--max-restarts", "1", *script)
    return swift_run("--machines", "2", "--spares", "1", *script, "--snapshot-every", str(every))


def read_ends(folder: Path) -> list[tuple[int, float]]:
    """The iterations that worker 0 has completed, with the time."""
    lines = (folder / "ends.txt").read_text().splitlines()
    return [(int(iteration), float(at)) for iteration, at in map(str.split, lines)]


if __name__ == "__main__":
    sys.exit(main())
