"""``swift-chaos``: a training of yours with random faults, compared bit for bit with an undisturbed run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from swift_ft.cli.common import OneLineParser, at_most, unit
from swift_ft.cli.first_help import SWIFT_CHAOS, add_version, answer_at_once, shorten_help
from swift_ft.cli.options import HelpFormatter
from swift_ft.cli.verb import ExitCode, ended
from swift_ft.errors import UsageError
from swift_ft.faults import Fault, parse_faults
from swift_ft.units import parse_seconds

if TYPE_CHECKING:
    from swift_ft.testing.chaos.campaign import Campaign

_MOST_PLANS = 1_000_000
_MOST_MACHINES = 64
_MOST_ITERATIONS = 1_000_000_000

_EPILOG = """\
examples:
  twenty plans against two machines; each run has a folder of its own:
    swift-chaos -- train.py --store {folder}/store

  all kinds of faults that this host can have, in a pipeline of four:
    swift-chaos --machines 4 --faults all -- train.py --store {folder}/store

  one plan again:
    swift-chaos --plan "kill machine=1 iteration=3" -- train.py --store {folder}/store

  a module, found from here:
    swift-chaos -- -m package.train --store {folder}/store

exit codes:
  0    every run was identical, within a documented bound, ended by its faults with a line, or complete with
       a last checkpoint that a fault has damaged
  1    a run was wrong, hung, crashed, left something behind, lost its checkpoint, or no fault struck in it
  2    not done: one line says why, and what to do
  130  interrupted; 143: stopped by SIGTERM, 129: by SIGHUP, 131: by SIGQUIT
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = [*(sys.argv[1:] if argv is None else argv)]
    if (text := answer_at_once(given, "swift-chaos", SWIFT_CHAOS)) is not None:
        sys.stdout.write(text)
        return ExitCode.OK
    return ended("swift-chaos", partial(_answer, given))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = OneLineParser(
        prog="swift-chaos",
        usage="%(prog)s [options] -- script.py | -m module [arguments of the script]",
        description="Run a training undisturbed, then with random faults, and compare all that it computed "
        "and wrote. {folder} in its arguments stands for a folder of each run's own; without it, that folder "
        "is the working directory.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_plans(made.add_argument_group("the plans"))
    _add_run(made.add_argument_group("each run"))
    answer = made.add_argument_group("the answer")
    answer.add_argument("--json", action="store_true", help="print JSON")
    answer.add_argument(
        "--keep", type=Path, metavar="DIR", help="where runs keep their files: in a new folder"
    )
    answer.add_argument(
        "--no-shrink", action="store_true", help="do not look for the smallest plan that fails"
    )
    answer.add_argument(
        "--shrink-runs",
        type=at_most(_MOST_PLANS),
        default=20,
        metavar="N",
        help="at most, for each failing plan",
    )
    answer.add_argument("--list-faults", action="store_true", help="list the kinds of faults, and end")
    made.add_argument("script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="and its arguments")
    shorten_help(made, SWIFT_CHAOS)
    add_version(made)
    return made


def _add_plans(group: argparse._ArgumentGroup) -> None:
    count = at_most(_MOST_PLANS, 1)
    group.add_argument("--plans", type=count, default=20, metavar="N", help="disturbed runs")
    group.add_argument("--seed", type=int, default=0, help="of the first plan; the others follow")
    group.add_argument("--plan", metavar="FAULTS", help="run this plan alone, as swift-run --inject has it")
    group.add_argument("--most", type=count, default=3, metavar="N", help="faults in one plan, at most")
    group.add_argument(
        "--faults",
        metavar="KINDS",
        help="the kinds to draw, with commas; store, network, change, or all (default: kill, stop, break)",
    )
    group.add_argument("--habits", action="store_true", help="plant habits of scripts into it, by the seed")


def _add_run(group: argparse._ArgumentGroup) -> None:
    machines = at_most(_MOST_MACHINES, 1)
    group.add_argument("--machines", type=machines, default=2, metavar="N", help="machines of each run")
    group.add_argument("--workers", type=machines, default=1, metavar="N", help="workers of each machine")
    group.add_argument(
        "--spares",
        type=at_most(_MOST_MACHINES, 0),
        metavar="N",
        help="machines that wait for a loss (default: --most, or as many as a longer --plan has faults)",
    )
    group.add_argument(
        "--torchrun",
        action="store_true",
        help="compare the undisturbed run with the same script under plain torchrun, too",
    )
    group.add_argument(
        "--networks",
        action="store_true",
        help="each machine has a network of its own, for faults of networks (on Linux)",
    )
    group.add_argument(
        "--microbatches",
        type=at_most(_MOST_ITERATIONS, 1),
        default=1,
        metavar="N",
        help="of the script's pipeline: in which of them to strike",
    )
    group.add_argument(
        "--store", default="", metavar="URL", help="the script's store (default: the one in the run's folder)"
    )
    group.add_argument(
        "--deadline",
        type=unit(parse_seconds),
        default=300.0,
        metavar="S",
        help="seconds after which it hangs, or more where its faults may take longer",
    )
    group.add_argument("--parallel", type=machines, default=1, metavar="N", help="runs at a time")
    group.add_argument("--launch", default="", metavar="FLAGS", help="more flags of swift-run: '--helpers 2'")


def _answer(given: Sequence[str]) -> int:
    args = parser().parse_args(given)
    try:
        if args.list_faults:
            from swift_ft.cli.chaos.report import print_kinds

            print_kinds(as_json=args.json)
            return ExitCode.OK
        return _run(args)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise UsageError(
            f"Files of the runs cannot be written or read: {error.strerror or error}{place}. "
            "Make room, or name another folder with --keep or TMPDIR."
        ) from error


def _run(args: argparse.Namespace) -> int:
    from swift_ft.cli.chaos.repeating import Repeats
    from swift_ft.cli.chaos.report import Report
    from swift_ft.testing.chaos.launchers import LAUNCHERS, StoppedError

    script = _script(args)
    plan = _plan(args)
    spares = args.spares if args.spares is not None else max(args.most, len(plan or ()))
    repeats = Repeats(parser(), args, script, spares)
    shrinks = 0 if args.no_shrink else args.shrink_runs
    try:
        with LAUNCHERS.stopped_by_signals():
            campaign = _campaign(args, script, plan, spares)
            good = Report(repeats, campaign, as_json=args.json, shrinks=shrinks).run()
    except StoppedError as error:
        return 128 + error.number
    return ExitCode.OK if good else ExitCode.FINDINGS


def _script(args: argparse.Namespace) -> tuple[str, ...]:
    """The script with its whole path, or ``-m`` and a module; and its arguments."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise UsageError("name the script after --: swift-chaos -- train.py --store {folder}/store")
    if script[0] in ("-m", "--module"):
        if not script[1:]:
            raise UsageError("name the module after -m: swift-chaos -- -m package.train")
        return ("-m", *script[1:])
    if not Path(script[0]).is_file():
        raise UsageError(f"There is no script {script[0]!r}: check the path.")
    return (str(Path(script[0]).absolute()), *script[1:])


def _plan(args: argparse.Namespace) -> tuple[Fault, ...] | None:
    """The plan that was given; None to draw them."""
    from swift_ft.faults import check_faults

    if args.plan is None:
        return None
    machines, workers = args.machines, args.workers
    check_faults(args.plan, machines=machines, workers_per_machine=workers, networks=args.networks)
    if not (plan := parse_faults(args.plan)):
        raise UsageError("--plan has no fault in it: write one as swift-run --inject has it, or omit it.")
    return plan


def _new_folder(keep: Path | None) -> Path:
    """A folder that nothing else is in: it is deleted as a whole."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="swift-chaos-"))
    try:
        keep.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="chaos-", dir=keep.absolute()))
    except OSError as error:
        raise UsageError(
            f"No folder can be made in --keep {keep} ({error.strerror}): name another one."
        ) from None


def _campaign(
    args: argparse.Namespace, script: tuple[str, ...], plan: tuple[Fault, ...] | None, spares: int
) -> Campaign:
    from swift_ft.testing.chaos.campaign import Campaign
    from swift_ft.testing.chaos.kinds import weights_of
    from swift_ft.testing.chaos.plans import WEIGHTS, Shape
    from swift_ft.testing.chaos.run_folder import FOLDER
    from swift_ft.testing.chaos.trial import Training

    if args.store and FOLDER not in args.store:
        raise UsageError(
            f"--store {args.store} would be one store of all runs: put {FOLDER} into it, as {FOLDER}/store."
        )
    launch = ("--standalone", "--machines", str(args.machines), "--nproc-per-node", str(args.workers))
    limits: tuple[str, ...] = ("--spares", str(spares), "--heartbeat-timeout", "4")
    limits += ("--networks",) * args.networks
    training = Training((*launch, *limits, *args.launch.split()), script, args.store, args.deadline)
    names = [name.strip() for name in (args.faults or "").split(",")]
    weights = WEIGHTS if args.faults is None else weights_of(names, networks=args.networks)
    shape = Shape(args.machines, args.workers, 1, args.microbatches, args.most, weights=weights)
    plans = 1 if plan is not None else args.plans
    if args.torchrun and args.habits:
        raise UsageError("--torchrun compares the script as it is: omit it, or --habits.")
    return Campaign(
        training,
        shape,
        _new_folder(args.keep),
        args.seed,
        plans,
        args.parallel,
        args.habits,
        learns=True,
        given=plan,
        torchrun=args.torchrun,
    )
