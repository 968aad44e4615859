"""The cost of logging while nothing fails: iteration time with logging against without it.

The same training in four variants, in turns:
  logged      swift-run --machines 4: every message between stages crosses machines, and is logged
  packed      the same, and every message is packed, as where the store is slower than a core packs
  unlogged    swift-run --machines 1 --nproc-per-node 4: the same session, and nothing to log
  plain       torchrun --nproc-per-node 4 with train_minimal.py: no session at all

The iterations are timed by the last stage's lines. Checkpoints are left out. A ratio is that of two
neighbouring runs' mean iteration times; medians of the ratios, and the range in parentheses.

Run it on an idle machine. Linux shares busy cores by session (autogroup), and the variants have different
numbers of sessions: under other load `unlogged`, with its one session, is starved, and its wall time means
nothing. CPU time suffers less, and is reported too.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.results import (
    TRAIN_WITH,
    Summary,
    Target,
    argument_parser,
    finish,
    of_repetitions,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.lib.usage import cpu_seconds
from examples.commands import EXAMPLES, CommandError, check, started, swift_run, torchrun

VARIANTS = ("logged", "packed", "unlogged", "plain")
RATIOS = {
    "logging": ("logged", "unlogged", "logging: logged / unlogged"),
    "packing": ("packed", "unlogged", "logging, packed: packed / unlogged"),
    "session": ("unlogged", "plain", "session without logging: unlogged / plain"),
    "all": ("logged", "plain", "everything: logged / plain"),
}
LIMIT = 1.02
PACKED = '{"compress": "always"}'
"""Arguments of the session."""


@dataclass(frozen=True)
class Run:
    """One run's timed iterations, in seconds, and the CPU seconds per iteration of all its processes."""

    iteration_s: list[float]
    cpu_s: float


CENTRES: dict[str, Callable[[Run], float]] = {
    "mean": lambda run: statistics.mean(run.iteration_s),
    "median": lambda run: statistics.median(run.iteration_s),
    "cpu": lambda run: run.cpu_s,
}


def main() -> int:
    """Runs the variants in turns and prints the report."""
    parser = argument_parser(__doc__, repetitions=5)
    parser.add_argument("--iterations", type=int, default=30, help="timed ones, default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=5, help="iterations not timed, default: %(default)s")
    args = parser.parse_args()
    samples: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
    for repetition in range(args.repetitions):
        for turn in range(len(VARIANTS)):
            variant = VARIANTS[(repetition + turn) % len(VARIANTS)]
            samples[variant].append(run := measure(variant, args.warm_up, args.iterations))
            text = ", ".join(f"{label} {centre(run):.4f} s" for label, centre in CENTRES.items())
            print(f"# {repetition + 1}, {variant}: {text}", file=sys.stderr, flush=True)
    summaries = summarise(samples)
    targets = judge(summaries)
    body = report(summaries, targets, args.repetitions, args.iterations)
    return finish("overhead", body, {"runs": samples, "summary": summaries}, args)


def measure(variant: str, warm_up: int, iterations: int) -> Run:
    """Trains with one variant and times the iterations after the first ``warm_up``, which is at least 1."""
    total = warm_up + iterations
    ends: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        folder = Path(name)
        output = folder / "output.txt"
        with started(
            _command(variant, total, folder), output, OMP_NUM_THREADS="1", SESSION=PACKED
        ) as process:
            for end in iteration_ends(process, output if variant == "plain" else folder / "logs"):
                ends.append(end)
                if len(ends) in (warm_up, total - 1):
                    cpu.append(cpu_seconds(process.pid))
            process.wait()
        check(process, output)
    if len(ends) != total:
        raise CommandError(f"{variant}: {len(ends)} of {total} iterations were seen")
    times = [end - begin for begin, end in itertools.pairwise(ends)]
    return Run(times[-iterations:], (cpu[1] - cpu[0]) / (total - 1 - warm_up))


def _command(variant: str, iterations: int, folder: Path) -> list[str]:
    count = ("--iterations", str(iterations))
    if variant == "plain":
        return torchrun("--nproc-per-node", "4", str(EXAMPLES / "train_minimal.py"), *count)
    shape = ("--machines", "1", "--nproc-per-node", "4") if variant == "unlogged" else ("--machines", "4")
    path = TRAIN_WITH if variant == "packed" else EXAMPLES / "train_swift.py"
    script = (str(path), *count, "--checkpoint-every", str(10 * iterations))
    return swift_run(*shape, "--log-dir", str(folder / "logs"), *script, "--store", str(folder / "store"))


def iteration_ends(process: subprocess.Popen[bytes], place: Path) -> Iterator[float]:
    """When each iteration's line appeared in the output file of the last stage's worker."""
    file: Path | None = None
    size, seen, running = 0, 0, True
    while running:
        running = process.poll() is None
        file = file or _written_by_last_stage(place)
        if file is not None and file.stat().st_size != size:
            now, text = time.time(), file.read_bytes()
            size = len(text)
            count = text.count(b": loss ")
            yield from [now] * (count - seen)
            seen = count
        time.sleep(0.005)


def _written_by_last_stage(place: Path) -> Path | None:
    files = place.rglob("stdout.log") if place.is_dir() else [place] if place.exists() else []
    return next((file for file in files if b": loss " in file.read_bytes()), None)


def summarise(samples: dict[str, list[Run]]) -> dict[str, Summary]:
    """Iteration times by variant, and the ratios of variants within each repetition."""
    found: dict[str, Summary] = {}
    for label, centre in CENTRES.items():
        one = {variant: [centre(run) for run in runs] for variant, runs in samples.items()}
        for variant, values in one.items():
            found[f"{variant} {label}"] = Summary.of(values)
        for name, (above, below, _) in RATIOS.items():
            pairs = zip(one[above], one[below], strict=True)
            found[f"{name} {label}"] = Summary.of([a / b for a, b in pairs])
    return found


def judge(summaries: dict[str, Summary]) -> list[Target]:
    """What was asked for, against the medians."""
    return [
        Target(f"{RATIOS[name][2]}, {kind}", f"<= {LIMIT}", ratio.text(""), ratio.median <= LIMIT)
        for name in ("logging", "packing", "all")
        for kind, ratio in [
            ("iteration time", summaries[f"{name} mean"]),
            ("CPU time", summaries[f"{name} cpu"]),
        ]
    ]


def report(summaries: dict[str, Summary], targets: list[Target], repetitions: int, iterations: int) -> str:
    """All results as Markdown."""
    rows = [
        [variant, *(summaries[f"{variant} {of}"].text(digits=4) for of in CENTRES)] for variant in VARIANTS
    ]
    rows += [
        [words, *(summaries[f"{name} {of}"].text("") for of in CENTRES)]
        for name, (_, _, words) in RATIOS.items()
    ]
    intro = (
        "Iteration time of the GPT of `examples/` (four stages, gloo, 1F1B) with a session whose messages "
        "cross machines (logged, and packed with zstd), with one whose messages do not (unlogged), and under "
        "plain torchrun. "
        f"{iterations} iterations a run. {of_repetitions(repetitions)}."
    )
    head = ["", "a run's mean iteration", "a run's median iteration", "CPU time of all processes"]
    return f"{intro}\n\n{table(head, rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
