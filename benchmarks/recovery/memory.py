"""Measures memory checkpoints: their cost per iteration, and a recovery against torchrun with DCP.

    python -m benchmarks.recovery.memory

A model sharded by FSDP2 on two machines with one worker each. Worker 1 gets SIGKILL 49 iterations after the
checkpoint in the store. The recovery lasts until worker 0 has completed the iteration in which that happened:
with memory checkpoints it repeats those since the last copy, and with torchrun all 49 in new processes.
torchrun's new processes do not always meet: then it starts them once more, or they hang. Such runs are
counted and said, and done again: what is compared is a recovery of torchrun that went well.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from contextlib import suppress
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
from examples.commands import ROOT, CommandError, finished, swift_run, torchrun

SCRIPT = ROOT / "benchmarks" / "recovery" / "scripts" / "sharded.py"
CHECKPOINT_EVERY, NEVER, LOST = 50, 10**6, 49
BLOCK, PAIRS, WARM_UP = 40, 8, 80
"""Iterations of a block, pairs of blocks with and without copies, and iterations before the first."""
TRIES, WITHIN_S = 10, 180.0
OVERHEAD, FASTER = 1.02, 5.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument("--width", type=int, default=1024, help="of the model, default: %(default)s")
    args = parser.parse_args()
    ours, theirs, bad = [], [], 0
    ratios = overheads(args.width)
    for number in range(args.repetitions):
        our = recovery_s("memory", args.width)
        assert our is not None  # a survivor's process goes on
        ours.append(our)
        seconds, failed = recovery_of_torchrun_s(args.width)
        theirs.append(seconds)
        bad += failed
        print(f"# {number + 1}: {ours[-1]:.2f} s, {theirs[-1]:.2f} s", file=sys.stderr)
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
        f"FSDP2 on two workers, copies as often as the session chooses, {LOST} iterations after a checkpoint "
        f"in the store. {args.repetitions} repetitions. Beside them, {bad} runs of torchrun started its "
        f"workers again more than once, or hung. What copies cost: in one run, {PAIRS} blocks of {BLOCK} "
        f"iterations with copies alternate with as many without.\n\n{table(['recovery', 'takes'], rows)}\n\n"
        + target_table(targets)
    )
    samples = {"overhead": ratios, "memory_s": ours, "torchrun_s": theirs, "torchrun_failed": bad}
    return finish("memory-checkpoints", body, samples, args)


def overheads(width: int) -> list[float]:
    """In one run, the time of each block of iterations with copies by that of the next one without."""
    with tempfile.TemporaryDirectory(prefix="swift-memory-") as name:
        folder = Path(name)
        training = command(folder, "memory", width, WARM_UP + 2 * PAIRS * BLOCK, NEVER)
        finished([*training, "--turns", str(BLOCK)], folder / "output.txt", OMP_NUM_THREADS="1")
        ends = [at for _, at in read_ends(folder)][WARM_UP - 1 :]
    blocks = [after - before for before, after in itertools.pairwise(ends[::BLOCK])]
    return [one / other for one, other in zip(blocks[::2], blocks[1::2], strict=True)]


def recovery_of_torchrun_s(width: int) -> tuple[float, int]:
    """The seconds of a recovery that went well, and how many did not before."""
    for failed in range(TRIES):
        with suppress(CommandError):
            if (seconds := recovery_s("dcp", width)) is not None:
                return seconds, failed
    raise CommandError(f"none of {TRIES} runs of torchrun recovered at the first attempt")


def recovery_s(way: str, width: int) -> float | None:
    """Seconds from SIGKILL until worker 0 has completed the iteration in which it happened.

    None if the workers had to be started again more than once.
    """
    dies_in = CHECKPOINT_EVERY + LOST
    with tempfile.TemporaryDirectory(prefix="swift-memory-") as name:
        folder = Path(name)
        full = [*command(folder, way, width, dies_in + 3, CHECKPOINT_EVERY), "--die", str(dies_in)]
        finished(full, folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        if len((folder / "starts.txt").read_text().splitlines()) > 2:
            return None
        died = float((folder / "died").read_text())
        return next(at for iteration, at in read_ends(folder) if iteration == dies_in) - died


def command(folder: Path, way: str, width: int, iterations: int, checkpoint_every: int) -> list[str]:
    """One training."""
    script = [str(SCRIPT), "--folder", str(folder), "--way", way, "--width", str(width)]
    script += ["--iterations", str(iterations), "--checkpoint-every", str(checkpoint_every)]
    if way == "dcp":
        return torchrun("--nproc-per-node", "2", "--max-restarts", "3", *script)
    return swift_run("--machines", "2", "--spares", "1", *script, "--snapshot-every", "auto")


def read_ends(folder: Path) -> list[tuple[int, float]]:
    """The iterations that worker 0 has completed, with the time."""
    lines = (folder / "ends.txt").read_text().splitlines()
    return [(int(iteration), float(at)) for iteration, at in map(str.split, lines)]


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
