"""Compares this checkout with another one in interleaved runs, to see what a change costs.

    python -m benchmarks.against ../before

Each repetition trains the example under both checkouts, each with its own package and its own example: once
undisturbed, and once with a machine that gets SIGKILL and is replaced. Then both step and undo a wrapped
optimizer. Ratios are this checkout's figure by the other's within a repetition; medians, and ranges.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.lib.results import Summary, argument_parser, finish, of_repetitions, run_benchmark, table
from benchmarks.lib.usage import cpu_seconds
from benchmarks.logging.overhead import iteration_ends
from examples.commands import ROOT, check, started, swift_run

KILL = "kill machine=1 iteration=27 point=forward microbatch=3"
ITERATIONS, WARM_UP, CHECKPOINT_EVERY = 40, 5, 20
FIGURES = {
    "iteration": "an iteration, wall",
    "iteration CPU": "an iteration, CPU of all processes",
    "recovery": "from SIGKILL to live again, a replay of 7 iterations included",
    "step": "a wrapped AdamW step, CPU",
    "undo": "its undo, CPU",
}

Figures = dict[str, float]


def main() -> int:
    """Measure both checkouts in turns, print, and keep."""
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    args = parser.parse_args()
    checkouts = {"this": ROOT, "other": args.other.resolve()}
    if not (checkouts["other"] / "swift_ft").is_dir():
        print(f"against.py: {args.other} is no checkout: it has no folder swift_ft", file=sys.stderr)
        return 2
    samples: dict[str, list[Figures]] = {name: [] for name in checkouts}
    for repetition in range(args.repetitions):
        for name in sorted(checkouts, reverse=bool(repetition % 2)):
            samples[name].append(figures := measure(checkouts[name]))
            print(f"# {repetition + 1}, {name}: {figures}", file=sys.stderr, flush=True)
    body = report(samples, args.repetitions)
    return finish("against", body, {"samples": samples}, args)


def measure(checkout: Path) -> Figures:
    """All figures of one checkout, in seconds."""
    env = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return {**_undisturbed(checkout, env), **_disturbed(checkout, env), **_optimizer(env)}


def _undisturbed(checkout: Path, env: Mapping[str, str]) -> Figures:
    ends: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory(prefix="swift-against-") as name:
        folder = Path(name)
        with started(_command(checkout, folder), folder / "output.txt", **env) as process:
            for end in iteration_ends(process, folder / "logs"):
                ends.append(end)
                if len(ends) in (WARM_UP, ITERATIONS - 1):
                    cpu.append(cpu_seconds(process.pid))
            process.wait()
        check(process, folder / "output.txt")
    times = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "iteration": statistics.mean(times[WARM_UP:]),
        "iteration CPU": (cpu[1] - cpu[0]) / (ITERATIONS - 1 - WARM_UP),
    }


def _disturbed(checkout: Path, env: Mapping[str, str]) -> Figures:
    with tempfile.TemporaryDirectory(prefix="swift-against-") as name:
        folder = Path(name)
        events = folder / "events.json"
        flags = ("--spares", "1", "--inject", KILL, "--events-out", str(events))
        with started(_command(checkout, folder, *flags), folder / "output.txt", **env) as process:
            process.wait()
        check(process, folder / "output.txt")
        report = json.loads(events.read_text())
    # Older checkouts have another name for this event, but the same field.
    killed = next(entry["at"] for entry in report["events"] if "fault" in entry)
    (recovery,) = report["recoveries"]
    return {"recovery": recovery["live"] - killed}


def _command(checkout: Path, folder: Path, *flags: str) -> list[str]:
    script = (str(checkout / "examples" / "train_swift.py"), "--iterations", str(ITERATIONS))
    store = ("--checkpoint-every", str(CHECKPOINT_EVERY), "--store", str(folder / "store"))
    return swift_run("--machines", "4", "--log-dir", str(folder / "logs"), *flags, *script, *store)


def _optimizer(env: Mapping[str, str]) -> Figures:
    script = ROOT / "benchmarks" / "undo" / "scripts" / "step_and_undo.py"
    with tempfile.NamedTemporaryFile(prefix="swift-against-") as output:
        with started([sys.executable, str(script)], Path(output.name), **env) as process:
            process.wait()
        check(process, Path(output.name))
        step, undo = Path(output.name).read_text().split()
    return {"step": float(step), "undo": float(undo)}


def report(samples: Mapping[str, list[Figures]], repetitions: int) -> str:
    """All ratios as Markdown."""
    rows = []
    for name, words in FIGURES.items():
        this, other = ([figures[name] for figures in samples[which]] for which in ("this", "other"))
        ratios = Summary.of([a / b for a, b in zip(this, other, strict=True)])
        absolute = [Summary.of(values).text(digits=4) for values in (this, other)]
        rows.append([words, *absolute, ratios.text("")])
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    intro = (
        f"Commit {commit} against the checkout before it: four machines, the GPT of `examples/`, gloo. "
        f"{of_repetitions(repetitions)}."
    )
    return f"{intro}\n\n{table(['', 'this', 'before', 'this / before'], rows)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
