"""Random plans of faults: the same seed draws the same ones."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swift_ft.faults import Action, Fault, Target
from swift_ft.faults.failpoints import Point
from swift_ft.faults.fault import ALL, OF_CHANGES, OF_NETWORKS, OF_STORES

_T = TypeVar("_T")

_IN_A_STEP = (Point.FORWARD, Point.BACKWARD, Point.OPTIMIZER, Point.BETWEEN)
_OF_REPLICAS = (Point.REDUCE, Point.REDUCING, Point.REDUCED, Point.UPDATE)
_OF_CHECKPOINTS = (Point.CHECKPOINT, Point.COMMIT)
_OF_COPIES = (Point.COPY,)
_OF_THE_JOB = (Point.START, Point.END)
_WHERE_PASSED = (Point.VERIFY,)
"""Of verified steps: drawn first only where an undisturbed run passes them."""
_IN_A_RECOVERY = (
    *(Point.LEAVE, Point.REPORT, Point.JOIN, Point.LOAD, Point.MOVE),
    *(Point.TRANSFER, Point.REPLAY, Point.HELP),
)

WEIGHTS = {Action.KILL: 8, Action.STOP: 1, Action.BREAK: 1}
"""The actions that are drawn unless others are asked for, and how often in comparison with each other."""
_TARGETS = {Target.MACHINE: 3, Target.WORKER: 1, Target.AGENT: 1}
_IN_A_CHANGE = (Point.PREPARED, Point.OFFER, Point.TAKE)
_WITHOUT_A_GROUP = (Point.START, Point.LEAVE, Point.REPORT, Point.LOAD, Point.JOIN, *_IN_A_CHANGE)
"""There a worker has no connections to others that could break."""
_OF_A_REPLACEMENT = (Point.LOAD, Point.REPLAY)
"""Survivors pass these seldom: most faults at them are aimed at an earlier one's place."""
_AIMED = 0.75
_POINTS = {_IN_A_STEP: 4, _OF_REPLICAS: 2, _OF_CHECKPOINTS: 1, _IN_A_RECOVERY: 3, _OF_THE_JOB: 1}
_WITH_COPIES = {**_POINTS, _OF_COPIES: 2}
_OF_A_MACHINE = (Action.SUSPEND, *sorted(OF_NETWORKS), *sorted(OF_CHANGES))
_OF_A_WORKER = (
    Action.BREAK,
    Action.FREEZE,
    Action.SLOW,
    Action.CLOCK,
    Action.FLIP,
    Action.TRUNCATE,
    Action.VANISH,
)
_SECONDS = {
    Action.FREEZE: (0.5, 3.0, 8.0),
    Action.SUSPEND: (0.5, 3.0, 8.0),
    Action.CLOCK: (-86400.0, -60.0, 60.0, 86400.0),
    Action.VANISH: (1.0, 5.0),
    **dict.fromkeys(sorted(OF_STORES), (1.0, 4.0)),
    **dict.fromkeys(sorted(OF_NETWORKS), (0.5, 3.0, 10.0)),
}
"""Below and above the silence after which a machine counts as lost, and the heartbeats of a worker."""
_FACTORS = (2.0, 5.0)
_CALLS = (1, 3, None)
_MBITS = (5.0, 50.0)
_WITH_A_PEER = (Action.UNPLUG, Action.MUTE, Action.DEAF)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a run, as far as it says what faults can strike.

    Attributes:
        machines: number of machines.
        workers: number of workers on each.
        iterations: that the script runs.
        microbatches: of a pipeline; 1 without one.
        most: the largest number of faults in a plan.
        copies: the script has memory checkpoints.
        points: that its workers pass in an undisturbed run; empty if that is not known.
        checkpoints: the iterations of its checkpoints; empty if they are not known.
        weights: the actions to draw, and how often in comparison with each other.
    """

    machines: int
    workers: int
    iterations: int
    microbatches: int = 1
    most: int = 3
    copies: bool = False
    points: frozenset[str] = frozenset()
    checkpoints: tuple[int, ...] = ()
    weights: Mapping[Action, int] = field(default_factory=lambda: dict(WEIGHTS))


def random_plan(shape: Shape, seed: int, attempt: int = 0) -> tuple[Fault, ...]:
    """One to ``shape.most`` faults. Those of a recovery strike if an earlier one causes it.

    Those of a change are drawn only behind a change.

    Args:
        shape: what there is to strike.
        seed: chooses.
        attempt: another plan of the same seed, where none of the earlier one's faults struck.
    """
    draw = random.Random(f"{seed} {attempt}" if attempt else seed)
    points = _IN_A_STEP + _OF_REPLICAS + _OF_CHECKPOINTS + _OF_THE_JOB + _OF_COPIES * shape.copies
    if shape.points:
        points = tuple(point for point in (*points, *_WHERE_PASSED) if point in shape.points)
    plan: tuple[Fault, ...] = (_random_fault(shape, draw, points),)
    more = draw.randint(0, shape.most - 1)
    kinds = _passed(_WITH_COPIES if shape.copies else _POINTS, shape.points)
    for _ in range(more):
        if any(fault.action in OF_CHANGES for fault in plan):
            kinds[_IN_A_CHANGE] = 6
        plan += (_random_fault(shape, draw, _choose(draw, kinds), plan),)
    return plan


def _passed(kinds: Mapping[tuple[Point, ...], int], points: Collection[str]) -> dict[tuple[Point, ...], int]:
    """The points of each kind that workers pass. Those of a recovery nobody has passed yet."""
    if not points:
        return {**kinds}
    kept = {
        (kind if kind == _IN_A_RECOVERY else tuple(point for point in kind if point in points)): weight
        for kind, weight in kinds.items()
    }
    return {kind: weight for kind, weight in kept.items() if kind}


def _random_fault(
    shape: Shape, draw: random.Random, points: tuple[Point, ...], earlier: tuple[Fault, ...] = ()
) -> Fault:
    action = _choose(draw, shape.weights)
    point = draw.choice(points)
    if action in _OF_A_WORKER:
        target = Target.WORKER
    elif action in _OF_A_MACHINE:
        target = Target.MACHINE
    else:
        target = _choose(draw, _TARGETS)
    if action in OF_CHANGES and point not in _IN_A_STEP:  # nobody may ask for one in a recovery or a change
        point = Point.BETWEEN
    if action == Action.BREAK and point in _WITHOUT_A_GROUP:
        point = draw.choice([one for one in points if one not in _WITHOUT_A_GROUP] or [Point.BETWEEN])
    of_a_microbatch = point in (Point.FORWARD, Point.BACKWARD) and shape.microbatches > 1
    if action in OF_STORES:
        target = draw.choice((Target.MACHINE, Target.WORKER))
    fault = Fault(
        action,
        target,
        _index(shape, draw, target, earlier if point in _OF_A_REPLACEMENT else ()),
        _iteration(shape, draw, point),
        point,
        microbatch=draw.randrange(shape.microbatches) if of_a_microbatch else None,
        seconds=draw.choice(_SECONDS[action]) if action in _SECONDS else None,
        factor=draw.choice(_FACTORS) if action == Action.SLOW else None,
        mbit=draw.choice(_MBITS) if action == Action.THROTTLE else None,
    )
    if action in OF_STORES:
        index = ALL if draw.random() < 0.5 else fault.index
        return replace(fault, index=index, calls=draw.choice(_CALLS))
    others = [slot for slot in range(shape.machines) if slot != fault.index]
    if action in _WITH_A_PEER and others and draw.random() < 0.4:
        return replace(fault, peer=draw.choice(others))
    return fault


def _index(shape: Shape, draw: random.Random, target: Target, earlier: tuple[Fault, ...]) -> int:
    """A machine or a worker: often one whose place an earlier fault has struck, if there are any."""
    each = shape.workers if target == Target.WORKER else 1
    slots = [
        fault.index // (shape.workers if fault.target == Target.WORKER else 1)
        for fault in earlier
        if fault.index != ALL
    ]
    if slots and draw.random() < _AIMED:
        return draw.choice(slots) * each + draw.randrange(each)
    return draw.randrange(shape.machines * each)


def _iteration(shape: Shape, draw: random.Random, point: Point) -> int | None:
    """One of all iterations, or of those few in which a point is passed; None for the first of these."""
    if shape.points and point in _OF_CHECKPOINTS and shape.checkpoints:
        return draw.choice(shape.checkpoints)
    if point in (*_IN_A_CHANGE, *_OF_THE_JOB) or (shape.points and point in (*_OF_COPIES, *_IN_A_RECOVERY)):
        draw.randrange(shape.iterations)
        return None
    return draw.randrange(shape.iterations)


def _choose(draw: random.Random, weights: Mapping[_T, int]) -> _T:
    (chosen,) = draw.choices(list(weights), list(weights.values()))
    return chosen
