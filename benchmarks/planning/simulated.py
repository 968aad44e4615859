"""A simulated training against an executed one: swift-sim gets the costs and the times of the failures.

Before and after the executed training a shorter one is measured: its iterations, and its recovery from one
failure. ``swift-sim --calibrate`` gets the means and the times at which the executed training really lost
machines; its total must be within 10 % of the executed one. The same calibration then says how much of the
time is useful if one of four machines is lost every ten minutes. Takes some minutes on two cores. Run it on
an idle machine: a simulation cannot know of load that changes between the runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
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
from benchmarks.recovery.breakdown import Breakdown, read_breakdown
from examples.commands import CommandError
from examples.disturbed import Failure, train
from swift_ft.cli import simulate
from swift_ft.storage.store import Store

CHECKPOINT_EVERY = 12
SHORT = (26, ((2, 20),))  # iterations; (machine, iteration) of each kill
LONG = (70, ((1, 18), (3, 34), (2, 56)))
LIMIT = 0.10
GOODPUT = 0.98
EVERY = ("--mtbf-per-machine", "40m", "--training-time", "100h", "--checkpoint-interval", "60s")
"""Of four machines one is lost every ten minutes."""
_CALIBRATION = "calibration.json"


def main() -> int:
    """Executes and simulates in turns and prints the report. Returns 1 if the target is missed."""
    parser = argument_parser(__doc__, repetitions=1)
    parser.add_argument("--breakdown", type=Path, help="write where the last executed training's time went")
    args = parser.parse_args()
    rows, useful = [], []
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        before = run(*SHORT, Path(name) / "before")
        for repetition in range(args.repetitions):
            executed = run(*LONG, Path(name) / f"executed-{repetition}")
            after = run(*SHORT, Path(name) / f"after-{repetition}")
            rows.append((executed, simulated_s(executed, (before, after), Path(name))))
            useful.append(goodput(executed.machines, Path(name)))
            before = after
    if args.breakdown:
        args.breakdown.write_text(json.dumps(executed.to_dict(), indent=1) + "\n")
    ratio = Summary.of([simulated / executed.training_s for executed, simulated in rows])
    met = ratio.low >= 1 - LIMIT and ratio.high <= 1 + LIMIT
    target = Target("simulated / executed training time", f"1 +- {LIMIT:g}", ratio.text(""), met)
    in_use = Summary.of(useful)
    often = Target(
        "goodput at one failure in ten minutes", f">= {GOODPUT}", in_use.text(""), in_use.low >= GOODPUT
    )
    body = report(rows, [target, often])
    runs = [{"simulated_s": simulated, **executed.to_dict()} for executed, simulated in rows]
    return finish("simulated", body, {"runs": runs}, args, well=met)


def run(iterations: int, kills: Sequence[tuple[int, int]], folder: Path) -> Breakdown:
    """Trains, kills these machines in mid-forward of these iterations, and returns where the time went."""
    failure = Failure(checkpoint_every=CHECKPOINT_EVERY)
    inject = "; ".join(f"kill machine={m} iteration={i} point=forward microbatch=3" for m, i in kills)
    report = train(failure, iterations, folder, inject=inject)
    store = Store(str(folder / "store"))
    found = read_breakdown(failure, iterations, [m for m, _ in kills], report, store)
    print(
        f"# {folder.name}: {found.training_s:.1f} s, {found.iteration_s:.3f} s an iteration", file=sys.stderr
    )
    return found


def simulated_s(executed: Breakdown, measured: Sequence[Breakdown], folder: Path) -> float:
    """What swift-sim says of the executed training, from measurements of others and the same failures."""
    calibration, trace = folder / _CALIBRATION, folder / "trace.csv"
    recoveries = [asdict(recovery) for one in measured for recovery in one.recoveries]
    calibration.write_text(json.dumps({"recoveries": recoveries}))
    trace.write_text("".join(f"{at},{machine}\n" for at, machine in executed.failures))
    iteration_s = sum(one.iteration_s for one in measured) / len(measured)
    found = simulated(
        *("--machines", str(executed.machines), "--training-time", f"{executed.iterations * iteration_s}s"),
        *("--checkpoint-interval", f"{executed.checkpoint_every * iteration_s}s", "--checkpoint-stall", "0s"),
        *("--trace", str(trace), "--calibrate", str(calibration), "--trials", "1"),
    )
    return float(found["hours"]) * 3600


def goodput(machines: int, folder: Path) -> float:
    """The useful part of the time at one failure in ten minutes, by the calibration that is in a folder."""
    calibration = ("--calibrate", str(folder / _CALIBRATION), "--checkpoint-stall", "0s")
    return float(simulated("--machines", str(machines), *EVERY, *calibration)["goodput"])


def simulated(*options: str) -> dict[str, Any]:
    """The answer of swift-sim for a pipeline that logs its messages."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if simulate.main((*options, "--json")) != 0:
            raise CommandError(f"swift-sim {' '.join(options)} failed")
    found: dict[str, Any] = json.loads(output.getvalue())["strategies"]["swift_logging"]
    return found


def report(rows: Sequence[tuple[Breakdown, float]], targets: Sequence[Target]) -> str:
    """All results as Markdown."""
    iterations, kills = LONG
    intro = (
        f"The GPT of `examples/` on four machines, {iterations} iterations, {len(kills)} machines killed by "
        "SIGKILL. Simulated from the mean iteration and the recoveries of trainings of "
        f"{SHORT[0]} iterations, one before and one after it, with the failures at the times at which they "
        "happened. The goodput is of 100 hours with a checkpoint each minute that stalls nothing, by the "
        "same calibration, with failures that are drawn."
    )
    cells = [
        [
            f"{executed.training_s:.1f} s",
            f"{executed.iteration_s:.3f} s",
            ", ".join(f"{at:.1f} s" for at, _ in executed.failures),
            f"{simulated:.1f} s",
            f"{simulated / executed.training_s:.3f}",
        ]
        for executed, simulated in rows
    ]
    head = ["executed", "its mean undisturbed iteration", "failures at", "simulated", "ratio"]
    return f"{intro}\n\n{table(head, cells)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
