"""The command line: many random plans of faults against a training of yours.

    python -m swift_ft.testing.chaos --plans 20 --machines 4 -- train.py --store {folder}/store

Everything after ``--`` is your script with its arguments. ``{folder}`` stands for a folder that each run has
for itself. The script must end with a checkpoint in the store: that is what is compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.campaign import Campaign, Shape
from swift_ft.testing.chaos.trial import Outcome, Training


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 if no run was wrong, hung or crashed."""
    args = parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="swift-chaos-"))
    counts: Counter[Outcome] = Counter()
    try:
        for trial in _campaign(args, folder).run():
            counts[trial.outcome] += 1
            said = f": {trial.reason}" if trial.reason else ""
            habits = f"({', '.join(trial.habits)}) " if trial.habits else ""
            console.print(f"{trial.outcome:10}  {habits}{trial.plan}{said}", markup=False)
            if trial.outcome == Outcome.IDENTICAL and trial.missed:
                console.print(f"            never struck: {'; '.join(trial.missed)}", markup=False)
            if trial.outcome not in (Outcome.IDENTICAL, Outcome.NOT_STRUCK):
                console.print(f"            see {trial.folder}/output.log", markup=False)
    except SwiftError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return EXIT_USAGE
    console.print(", ".join(f"{counts[outcome]} {outcome.lower()}" for outcome in Outcome))
    return 1 if counts[Outcome.WRONG] + counts[Outcome.HUNG] + counts[Outcome.CRASHED] else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m swift_ft.testing.chaos",
        description="Runs a training once undisturbed, then with random faults, and compares the results.",
    )
    made.add_argument("--plans", type=int, default=20, metavar="N", help="disturbed runs, default: 20")
    made.add_argument("--seed", type=int, default=0, help="of the first plan, default: 0")
    made.add_argument("--faults", type=int, default=3, metavar="N", help="at most in one run, default: 3")
    made.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time, default: 1")
    made.add_argument("--machines", type=int, default=2, metavar="N", help="default: 2")
    made.add_argument("--workers", type=int, default=1, metavar="N", help="of each machine, default: 1")
    made.add_argument("--iterations", type=int, default=8, metavar="N", help="of the script, default: 8")
    made.add_argument("--microbatches", type=int, default=1, metavar="N", help="of its pipeline, default: 1")
    made.add_argument("--copies", action="store_true", help="faults strike memory checkpoints, too")
    made.add_argument("--habits", action="store_true", help="plant habits of scripts into it, by the seed")
    made.add_argument("--store", default="{folder}/store", help="the script's store, default: %(default)s")
    made.add_argument("--deadline", type=float, default=300.0, metavar="S", help="of a run, default: 300")
    made.add_argument("--keep", type=Path, metavar="DIR", help="where runs keep their files")
    made.add_argument(
        "--launch", default="", metavar="FLAGS", help="more flags of swift-run, such as '--helpers 2'"
    )
    made.add_argument("script", nargs="+", help="after --: the script and its arguments")
    return made


def _campaign(args: argparse.Namespace, folder: Path) -> Campaign:
    launch = ("--standalone", "--machines", str(args.machines), "--nproc-per-node", str(args.workers))
    limits = ("--spares", str(args.faults), "--heartbeat-timeout", "4")
    training = Training(
        (*launch, *limits, *args.launch.split()), tuple(args.script), args.store, args.deadline
    )
    shape = Shape(args.machines, args.workers, args.iterations, args.microbatches, args.faults, args.copies)
    return Campaign(training, shape, folder, args.seed, args.plans, args.parallel, args.habits)


if __name__ == "__main__":
    sys.exit(main())
