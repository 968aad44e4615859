"""Random faults while a running job changes to other worlds, compared with a run that nothing happens to.

    python -m tests.support.change_chaos --plans 100 --seed 0

Each plan has one or two changes (machines swap places, one moves to a spare, layers go to other numbers of
machines, the script is started anew) and one or two faults, most of them at points of a change. The seed says
all. Exit code 1: a run was wrong, hung, crashed, or left something behind.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from swift_ft.faults import Action, Fault, Point, Target, parse_faults
from swift_ft.recovery.entries import event_from_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.testing.chaos.endings import beyond_faults
from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_same_layers,
    assert_undisturbed,
    run_cluster,
    training,
)
from tests.support.worlds import CHANGES_WORLD, Change, given_up, worlds_of

ITERATIONS = 50
_EVERY = 20
_SPARES = 2
_MACHINES = {"train_ddp": 2, "train_elastic": 3, "train_swift": 3}
_OF_A_CHANGE = (Point.PREPARED, Point.OFFER, Point.TAKE)
_AROUND = (Point.OPTIMIZER, Point.BETWEEN, Point.JOIN, Point.REPORT, Point.CHECKPOINT)
_ACTIONS = {Action.KILL: 6, Action.STOP: 1, Action.RAISE: 1, Action.BREAK: 1, Action.SUSPEND: 1}
_TARGETS = {Target.MACHINE: 3, Target.WORKER: 3, Target.AGENT: 1}
_GOOD = ("identical", "ended", "not struck")


@dataclass(frozen=True)
class Plan:
    """What is done to a run.

    Attributes:
        example: its script.
        changes: as `cluster/scripts/changes_world.py` takes them.
        faults: as ``--inject`` has them.
        flags: of the launcher.
    """

    example: str
    changes: tuple[Change, ...]
    faults: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        """In a line."""
        shown = ", ".join(
            f"from {at} on {slots} {' '.join(args)}".rstrip() for at, slots, args in self.changes
        )
        return f"{self.example}: {shown}; {self.faults}; {' '.join(self.flags)}"


@dataclass(frozen=True)
class Result:
    """How the run of a plan ended.

    Attributes:
        outcome: in a word.
        reason: of what is not identical.
        worlds: changes that have come.
        given_up: changes that were given up.
        ways: modes of its recoveries.
    """

    outcome: str
    reason: str = ""
    worlds: int = 0
    given_up: int = 0
    ways: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it is no finding."""
        return self.outcome in _GOOD


def random_plan(seed: int) -> Plan:
    """One or two changes, and one or two faults."""
    draw = random.Random(seed)
    example = draw.choice([*_MACHINES])
    machines = _MACHINES[example]
    changes, at = list[Change](), draw.randrange(2, 6)
    for _ in range(draw.choice((1, 1, 2))):
        changes.append((at, *_change(draw, example, machines)))
        at += 10
    faults = [_fault(draw, machines, first=number == 0) for number in range(draw.choice((1, 1, 2)))]
    restarts = draw.choice((("--max-restarts=0",), ()))
    guests = draw.choice(((), (), ("--no-replacement", "--elastic-wait=0")))
    return Plan(example, tuple(changes), "; ".join(map(str, faults)), (*restarts, *guests))


def _change(draw: random.Random, example: str, machines: int) -> tuple[list[int], list[str]]:
    slots = [*range(machines)]
    match draw.choice(("swap", "move", "move", "reload", "scale")):
        case "move":
            slots[draw.randrange(machines)] = machines  # the spare that has waited longest
        case "reload":
            return slots, [f"--iterations={ITERATIONS}"]
        case "scale" if example == "train_elastic":
            return draw.choice(([0, 2], [1, 0], [1, 0, 2, 3])), []
        case _:
            draw.shuffle(slots)
    return slots, []


def _fault(draw: random.Random, machines: int, *, first: bool) -> Fault:
    (action,) = draw.choices([*_ACTIONS], [*_ACTIONS.values()])
    point = draw.choice(_OF_A_CHANGE if first or draw.random() < 0.5 else _AROUND)
    if action in (Action.RAISE, Action.BREAK):
        target = Target.WORKER
    elif action == Action.SUSPEND:
        target = Target.MACHINE
    else:
        (target,) = draw.choices([*_TARGETS], [*_TARGETS.values()])
    of_a_step = point in (Point.OPTIMIZER, Point.BETWEEN)
    iteration = draw.randrange(5, ITERATIONS) if of_a_step else None
    return Fault(action, target, draw.randrange(machines), iteration, point)


References = Callable[[str, int], ClusterRun]


def references_in(folder: Path) -> References:
    """Undisturbed runs, by script and machines; each is made when it is first asked for."""

    @functools.cache
    def reference(example: str, machines: int) -> ClusterRun:
        place = folder / f"{example}-{machines}"
        script = training(place, EXAMPLES / f"{example}.py", iterations=ITERATIONS)
        script += [f"--checkpoint-every={_EVERY}"]
        return assert_undisturbed(run_cluster(place, machines=machines, script=script))

    return reference


def run_plan(folder: Path, plan: Plan, reference: References) -> Result:
    """Run it, and compare the weights of each layer."""
    folder.mkdir(parents=True, exist_ok=True)
    _, *args = training(folder, CHANGES_WORLD, iterations=ITERATIONS)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EXAMPLE", plan.example)
        environment.setenv("CHANGES", json.dumps(plan.changes))
        script = [str(CHANGES_WORLD), *args, f"--checkpoint-every={_EVERY}"]
        flags = [f"--spares={_SPARES}", *plan.flags]
        try:
            run = run_cluster(
                folder, machines=_MACHINES[plan.example], script=script, inject=plan.faults, flags=flags
            )
        except (AssertionError, pytest.fail.Exception) as error:
            hung = "did not end within" in str(error)
            return Result("HUNG" if hung else "LEAKED", str(error))
    return _judged(run, plan, reference)


def _judged(run: ClusterRun, plan: Plan, reference: References) -> Result:
    facts: dict[str, Any] = {
        "worlds": len(worlds_of(run)) if run.report else 0,
        "given_up": len(given_up(run)) if run.report else 0,
        "ways": tuple(one["mode"] or "unfinished" for one in run.report.get("recoveries", ())),
    }
    last = next((line for line in reversed(run.output.splitlines()) if line.startswith("swift-run: ")), "")
    if not run.report or (run.code and not last) or "\nTraceback" in run.output:
        return Result("CRASHED", run.output[-3000:], **facts)
    missed = run.report["missed_faults"]
    struck = len(run.events("FaultInjected"))
    if run.code and not (run.report["ok"] and missed):
        own_error = beyond_faults(run.report["events"], parse_faults(plan.faults))
        if own_error or not struck:
            return Result("CRASHED", own_error or f"no fault struck: {last}", **facts)
        return Result("ended", last, **facts)
    state = State()
    for event in run.report["events"]:
        state = step(state, event_from_dict(event))
    try:
        run.code = 0
        assert_same_layers(run, reference(plan.example, state.shape.machines))
    except AssertionError as error:
        return Result("WRONG", str(error)[:2000], **facts)
    return Result("identical" if struck else "not struck", "; ".join(missed), **facts)


def main() -> int:
    """Run plans, and say how each ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first one, default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further plan after that time")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="change-chaos-"))
    reference, began = references_in(folder / "undisturbed"), monotonic()
    counts, switched, stopped = Counter[str](), 0, 0
    for seed in range(args.seed, args.seed + args.plans):
        if monotonic() - began > 60 * args.minutes:
            break
        plan, place = random_plan(seed), folder / f"seed-{seed}"
        result = run_plan(place, plan, reference)
        counts[result.outcome] += 1
        switched, stopped = switched + result.worlds, stopped + result.given_up
        ways = ", then ".join(result.ways) or "no recovery"
        facts = f"{result.worlds} of {len(plan.changes)} came, {result.given_up} given up, {ways}"
        print(f"{result.outcome:10}  seed {seed}: {plan}: {facts}", flush=True)
        if result.reason and result.outcome not in ("identical", "not struck"):
            print(f"            {result.reason[:500]}", flush=True)
        if result.is_good:
            shutil.rmtree(place, ignore_errors=True)
        else:
            print(
                f"            again: python -m tests.support.change_chaos --seed {seed} --plans 1", flush=True
            )
            (place / "reason.txt").write_text(result.reason)
            print(f"            see {place}/reason.txt", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"{switched} changes came, {stopped} were given up")
    return int(any(outcome not in _GOOD for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
