"""Changes of a running job to another world: planned, waited for, given up (`recovery/worlds.py`)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not

from swift_ft.cli.recover.running import declare_run, secret_of_run, who_asks
from swift_ft.cli.verb import ExitCode, print_json
from swift_ft.coordination.follower import Follower
from swift_ft.errors import UsageError
from swift_ft.network.command_proof import proof_of_command
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import event_to_dict
from swift_ft.recovery.handlers.worlds import all_offered, world_size_of
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_world import check_changeable
from swift_ft.units import counted, format_seconds, some


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a change.

    Attributes:
        world: the number of the world that was planned.
        machines: its machines by slot.
        switched: it has taken over.
        reason: why the job does not train in it; empty if it does.
        iteration: iterations that were completed when it took over; None if it did not.
        pause_s: seconds from the first worker's stop until all trained again, as seen from here; None if they
            did not, or too quickly to be seen.
        seconds: from the request to the end.
        interrupted: by Ctrl-C.
    """

    world: int
    machines: tuple[str, ...]
    switched: bool
    reason: str
    iteration: int | None
    pause_s: float | None
    seconds: float
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """0 if the job trains in it, 1 if it was given up, 130 after Ctrl-C."""
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.FINDINGS if self.reason else ExitCode.OK


def declare_change(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of all commands that change a running job."""
    declare_run(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a change that has not happened is given up (default 600)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check, and print what would be asked for")


def declare_script(parser: argparse.ArgumentParser) -> None:
    """Declare the script of a change, and what proves that a member of the job asks for it."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the run's token, if it has one: needed where another script or other arguments are given",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ...",
        help="the script and all its arguments (default: those that the job has now)",
    )


def script_of(words: Sequence[str]) -> tuple[str, ...]:
    """The script and its arguments that a command was given, with or without ``--`` before them."""
    return tuple(words[1:] if words[:1] == ["--"] else words)


def planned(
    state: State,
    machines: tuple[str, ...],
    *,
    command: tuple[str, ...] = (),
    plan: str = "",
    reason: str,
) -> ev.ChangePlanned:
    """The event that asks for a world of these machines."""
    number = state.worlds.planned + 1
    return ev.ChangePlanned(
        world=number, machines=machines, command=command, plan=plan, reason=reason, asked_by=who_asks()
    )


def run_change(
    run_id: str, follower: Follower, args: argparse.Namespace, plan: Callable[[State], ev.ChangePlanned]
) -> ExitCode:
    """Check a change, ask for it, wait for its end, and say what came of it.

    Args:
        run_id: names the run in the outcome.
        follower: follows the run's journal.
        args: as :func:`declare_change` declares them.
        plan: makes the change for a state in which one is possible.

    Raises:
        UsageError: if it is not possible.
    """
    check_changeable(follower.state)
    change = plan(follower.state)
    if change.command:
        secret = secret_of_run(args.rdzv_endpoint, run_id, args.token_file)
        change = dataclasses.replace(change, proof=proof_of_command(secret, run_id, change.command))
    if args.dry_run:
        show_planned(change, as_json=args.json)
        return ExitCode.OK
    outcome = switch(follower, change, timeout_s=args.timeout, tell=not args.json)
    if args.json:
        print_json(facts_of(run_id, outcome))
    return outcome.exit_code


def show_planned(change: ev.ChangePlanned, *, as_json: bool) -> None:
    """Print an event that is not appended."""
    if as_json:
        print_json(event_to_dict(change))
    else:
        print(change)


def facts_of(run_id: str, outcome: Outcome) -> dict[str, object]:
    """An outcome for programs."""
    return {"run": run_id, **dataclasses.asdict(outcome)}


def switch(follower: Follower, change: ev.ChangePlanned, *, timeout_s: float, tell: bool) -> Outcome:
    """Ask for a change, and wait until it has switched or was given up.

    Ctrl-C and the end of the time give it up, if it has not switched by then.

    Args:
        follower: of the run's journal.
        change: what is asked for.
        timeout_s: how long to wait.
        tell: whether to print each phase, and the outcome.

    Raises:
        UsageError: if another change came first, or the run has ended or stopped training meanwhile.
    """
    wait = _Wait(follower, change, tell=tell)
    interrupted, reason = False, ""
    try:
        state = follower.append(change)
        _check_accepted(state, change)
        if tell:
            on = f"on {counted(len(change.machines), 'machine')}: {some(change.machines)}"
            print(f"world {change.world}: planned, {on}", flush=True)
        state = wait.until_over(state, timeout_s)
        if _is_open(state, change):
            reason = f"it had not happened within {timeout_s:g} s"
    except KeyboardInterrupt:
        interrupted, reason = True, f"{change.asked_by} gave it up (Ctrl-C)"
    if reason:
        state = follower.append(ev.ChangeGivenUp(world=change.world, reason=reason))
    outcome = dataclasses.replace(wait.outcome(state), interrupted=interrupted)
    if tell:
        _tell(outcome)
    return outcome


def _check_accepted(state: State, change: ev.ChangePlanned) -> None:
    worlds = state.worlds
    if worlds.planned < change.world:
        check_changeable(state)  # says what has changed, as a rule
        raise UsageError("the run cannot change now: ask again")
    if worlds.change is not None and not _is_open(state, change):
        raise UsageError("somebody else has asked for another change at the same time: ask again after it")


def _is_open(state: State, change: ev.ChangePlanned) -> bool:
    """Whether this change is under way, and no other one that got its number."""
    open_change = state.worlds.change
    if open_change is None or open_change.world.number != change.world:
        return False
    world = open_change.world
    same = world.machines == change.machines and (change.command or world.command) == world.command
    return same and (change.plan or world.plan) == world.plan


def _has_switched(state: State, change: ev.ChangePlanned) -> bool:
    return state.worlds.present.number >= change.world


class _Wait:
    """Follows one change, and notes when training stops and goes on."""

    def __init__(self, follower: Follower, change: ev.ChangePlanned, *, tell: bool) -> None:
        self._follower = follower
        self._change = change
        self._tell = tell
        self._began = time.monotonic()
        self._stopped_at: float | None = None
        self._live_at: float | None = None
        self._told = ""

    def until_over(self, state: State, timeout_s: float) -> State:
        """Wait until all train in the next world, or the change was given up, or the time is over."""
        deadline = self._began + timeout_s
        while True:
            self._look(state)
            if self._live_at is not None or state.phase == Phase.ENDED:
                return state
            if not _is_open(state, self._change) and not _has_switched(state, self._change):
                return state
            if (left_s := deadline - time.monotonic()) <= 0:
                return state
            self._follower.wait_for(partial(is_not, state), min(left_s, 1.0))
            state = self._follower.state

    def outcome(self, state: State) -> Outcome:
        """The outcome, in the state that came last."""
        self._look(state)
        switched = _has_switched(state, self._change)
        pause_s = None
        if self._live_at is not None and self._stopped_at is not None:
            pause_s = self._live_at - self._stopped_at
        return Outcome(
            self._change.world,
            self._change.machines,
            switched,
            "" if self._live_at is not None else self._why_not(state, switched=switched),
            state.worlds.present.since if switched else None,
            pause_s,
            time.monotonic() - self._began,
        )

    def _why_not(self, state: State, *, switched: bool) -> str:
        """Why the job does not train in the next world."""
        if state.phase == Phase.ENDED:
            return f"the run has ended: {state.verdict.reason if state.verdict is not None else 'no reason'}"
        if switched:
            return "not all of its workers train yet"
        ours = state.worlds.planned == self._change.world
        return (state.worlds.given_up if ours else "") or "another change came after it"

    def _look(self, state: State) -> None:
        now = time.monotonic()
        open_change = state.worlds.change if _is_open(state, self._change) else None
        if self._stopped_at is None and open_change is not None and open_change.offered:
            self._stopped_at = now
        if self._live_at is None and _has_switched(state, self._change) and state.phase == Phase.LIVE:
            self._live_at = now
        words = phase_of(state, self._change)
        if self._tell and words and words != self._told:
            self._told = words
            print(f"world {self._change.world}: {words}", flush=True)


def phase_of(state: State, change: ev.ChangePlanned) -> str:
    """The phase of a change, in words; empty once it is over."""
    if _has_switched(state, change):
        return "" if state.phase == Phase.LIVE else "all have their state: it takes over"
    if not _is_open(state, change):
        return ""
    under_way = state.worlds.change
    assert under_way is not None
    prepared, workers = under_way.prepared, world_size_of(state, under_way)
    pending = state.layouts.pending
    if pending is not None and all_offered(state, under_way):
        return f"stopped at iteration {pending.iteration}"
    if pending is not None:
        return f"stops at iteration {pending.iteration}"
    return f"prepared {len(prepared)} of {counted(workers, 'worker')}" if prepared else ""


def _tell(outcome: Outcome) -> None:
    """Say how a change has ended."""
    took, world = format_seconds(outcome.seconds), f"world {outcome.world}"
    if not outcome.switched:
        error = f"{world} was given up: {outcome.reason}"
    elif outcome.reason:
        error = f"{world} has taken over, but {outcome.reason}"
    else:
        error = "too late to give it up" if outcome.interrupted else ""
        pause = "" if outcome.pause_s is None else f" after a pause of {format_seconds(outcome.pause_s)}"
        print(f"{world}: switched at iteration {outcome.iteration}{pause}, {took} after it was asked for")
    if error:
        sys.stderr.write(f"swift-recover: {error}\n")
