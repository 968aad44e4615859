"""``swift-recover replay``: the state of a lost machine, without its job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from swift_ft.cli.recover.progress import step_progress
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.errors import CheckpointError, RecoveryError, UsageError, first_line
from swift_ft.offline.replay import OfflineReplayResult, ReplayRequest, replay_machine
from swift_ft.units import named

_DESCRIPTION = """\
Rebuild the workers of one machine on this host, from their checkpoint and the logs of the others, and save
their state as DCP checkpoints: DIR/rank-00003 of worker 3. The store is only read. SCRIPT and its arguments
are those of the run; the script runs up to the iteration that is asked for, and ends there.
"""


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the store that the script gave to swift_ft.Session")
    parser.add_argument("--machine", type=int, required=True, metavar="M", help="the machine to rebuild")
    parser.add_argument(
        "--to-iteration",
        type=int,
        metavar="N",
        help="iterations that the rebuilt state has completed (default: as many as the log allows)",
    )
    parser.add_argument(
        "--from-checkpoint",
        type=int,
        metavar="I",
        help="begin with this checkpoint (default: the newest intact one that is not after N)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty or absent folder")
    parser.add_argument(
        "--check-against",
        metavar="PATH",
        help="compare bit for bit: STORE/checkpoints/ITERATION, a part in it, or the DIR of another replay",
    )
    parser.add_argument(
        "script", nargs="+", metavar="-- SCRIPT", help="the run's script (or -m MODULE), and its arguments"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    request = _request(args)
    try:
        with step_progress("replaying") as show:
            result = replay_machine(
                request, lambda plan, rank, done: show(rank, done - plan.begin, plan.until - plan.begin)
            )
    except (CheckpointError, RecoveryError) as error:
        sys.stderr.write(f"swift-recover: {first_line(error)}{_hint(request)}\n")
        return ExitCode.FINDINGS
    if args.json:
        print_json(result.to_dict())
    else:
        _print(result)
    return ExitCode.FINDINGS if result.differences else ExitCode.OK


def _request(args: argparse.Namespace) -> ReplayRequest:
    target, *rest = args.script
    kind = "script"
    if target == "-m":
        if not rest:
            raise UsageError("-m needs the name of a module")
        kind, (target, *rest) = "module", rest
    return ReplayRequest(
        store=args.store,
        machine=args.machine,
        out=args.out,
        kind=kind,
        target=target,
        args=tuple(rest),
        until=args.to_iteration,
        checkpoint=args.from_checkpoint,
        check_against=args.check_against,
    )


def _hint(request: ReplayRequest) -> str:
    """A note that names the folder of the script's output; empty if there is no output."""
    return f" (the script's output is in {request.out})" if any(request.out.glob("*.log")) else ""


def _print(result: OfflineReplayResult) -> None:
    write = sys.stdout.write
    write(
        f"{named('worker', result.parts)} of run {result.run_id}: {result.iteration} iterations completed, "
        f"replayed from the checkpoint of iteration {result.checkpoint}\n"
    )
    for rank, folder in result.parts.items():
        write(f"worker {rank}: {folder}\n")
    if not result.setup_known:
        write("the journal of the run is not in the store: it is unknown whether this is its script\n")
    for rank in result.compared:
        different = (result.differences or {}).get(rank, ())
        write(f"worker {rank} is {'not the same' if different else 'identical, bit for bit'}\n")
        for name in different:
            write(f"  {name} differs\n")


VERB = Verb(
    description=_DESCRIPTION,
    declare=_declare,
    run=_run,
)
