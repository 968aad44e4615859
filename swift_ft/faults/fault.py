"""Faults as data: which machine fails when, where and how, as the demo and the tests use them.

As text, for ``swift-run --inject``::

    kill machine=1 iteration=47 point=forward microbatch=3; stop worker=2 iteration=50 point=optimizer
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.faults.failpoints import Point

__all__ = ["Action", "Fault", "Point", "Target", "check_faults", "fail_at", "missed_faults", "parse_faults"]


_ANY = "any"
ALL = -1
"""The index of a fault that strikes all machines."""
_ALL = "all"
_NUMBERS = ("microbatch", "bucket", "committed", "calls", "peer")
_AMOUNTS = ("seconds", "factor", "each", "mbit")


class Action(StrEnum):
    """The effect of a fault on its target."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP: the target falls silent, but its sockets stay open."""
    RAISE = "raise"
    """The script raises an exception of its own."""
    BREAK = "break"
    """The worker's connections break, and no process dies. It strikes only while the worker has some."""
    FREEZE = "freeze"
    """A thread holds the interpreter for ``seconds``: no other line of Python runs in the worker."""
    SUSPEND = "suspend"
    """All processes of the machine stop for ``seconds``, as those of a suspended virtual machine."""
    SLOW = "slow"
    """From then on all that the worker computes takes ``factor`` times as long."""
    CLOCK = "clock"
    """``time.time()`` and ``time.time_ns()`` of the worker jump by ``seconds``, backwards if negative.

    ``datetime.now()`` does not, nor a function that was imported from ``time`` by its name.
    """
    FLIP = "flip"
    """One bit of the newest finished file in the session's store is another one from then on."""
    TRUNCATE = "truncate"
    """The newest finished file in the session's store loses its second half."""
    VANISH = "vanish"
    """The folder of the session's store, with all that is in it, is gone for ``seconds``, as a lost mount."""
    UNWRITABLE = "unwritable"
    """The store fails all that is written (EIO)."""
    UNREADABLE = "unreadable"
    """The store fails all that is read (EIO)."""
    MISSING = "missing"
    """The store does not find what is there."""
    LAG = "lag"
    """Each call of the store takes ``each`` seconds longer."""
    BUSY = "busy"
    """The store asks for fewer calls (503 Slow Down, EBUSY)."""
    DENIED = "denied"
    """The store refuses the credentials (EACCES)."""
    TORN = "torn"
    """Half of what is written gets to the store, and then the call fails (EIO); so does what is read."""
    FULL = "full"
    """The store has no room (ENOSPC); what is there can be read and deleted."""
    READ_ONLY = "read-only"
    """The store is mounted read-only (EROFS)."""
    UNPLUG = "unplug"
    """The machine's network is cut, both ways; with ``peer``, only between these two machines."""
    MUTE = "mute"
    """Nothing that the machine sends arrives; with ``peer``, only at that machine."""
    DEAF = "deaf"
    """Nothing that is sent to the machine arrives; with ``peer``, only from that machine."""
    FLAP = "flap"
    """The machine's network is cut and back again every second."""
    THROTTLE = "throttle"
    """The machine sends ``mbit`` megabits a second at most."""
    RELOAD = "reload"
    """A planned change: the job goes on in new processes on the same machines, as after a reload."""
    MOVE = "move"
    """A planned change: a spare takes the machine's slot, or else the next machine does, for its own."""


OF_STORES = frozenset(
    {
        Action.UNWRITABLE,
        Action.UNREADABLE,
        Action.MISSING,
        Action.LAG,
        Action.BUSY,
        Action.DENIED,
        Action.TORN,
        Action.FULL,
        Action.READ_ONLY,
    }
)
"""Calls of the store go wrong, in a worker, in all workers of a machine, or everywhere."""
OF_FILES = frozenset({Action.FLIP, Action.TRUNCATE, Action.VANISH})
"""Files of the store are damaged, or all of them are gone for a while."""
OF_NETWORKS = frozenset({Action.UNPLUG, Action.MUTE, Action.DEAF, Action.FLAP, Action.THROTTLE})
"""Of machines with networks of their own (``swift-run --networks``)."""
OF_CHANGES = frozenset({Action.RELOAD, Action.MOVE})
"""Another world takes over, as if an operator had asked for it. Nothing is hurt."""
DEFAULT_SECONDS = {
    Action.FREEZE: 3.0,
    Action.SUSPEND: 3.0,
    Action.CLOCK: -3600.0,
    **dict.fromkeys([Action.VANISH, *OF_STORES, *OF_NETWORKS], 3.0),
}
"""The ``seconds`` of a fault that names none. The other actions have none."""
DEFAULT_FACTOR = 3.0
DEFAULT_EACH_S = 0.2
DEFAULT_MBIT = 10.0
_OF_A_WORKER = {Action.FREEZE, Action.SLOW, Action.CLOCK, *OF_FILES}
_OF_A_MACHINE = {Action.SUSPEND, *OF_NETWORKS, *OF_CHANGES}
_WITH_A_PEER = {Action.UNPLUG, Action.MUTE, Action.DEAF}


class Target(StrEnum):
    """The target of a fault."""

    MACHINE = "machine"
    """The agent and all of its workers."""
    WORKER = "worker"
    """The worker's process alone."""
    AGENT = "agent"
    """The agent's process alone."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It happens once in a run, even if the iteration is repeated.

    Attributes:
        action: what happens.
        target: to what.
        index: the machine's slot, or the worker's rank; :data:`ALL` for all of them.
        iteration: the iteration in which it happens; None for the first one that gets to the point.
        point: where in the iteration.
        microbatch: for ``forward`` and ``backward``: before which microbatch; None for the first one.
        bucket: for points of a bucket of gradients or of a transfer: which bucket; None for the first one.
        committed: the target waits at the point until the checkpoint of this iteration, or a later one, is
            committed, so that what the fault costs does not depend on how fast the store is; None: no wait.
        seconds: for actions that end by themselves: when; None for :data:`DEFAULT_SECONDS`. Of a store's
            trouble each worker counts them from when it is struck itself.
        factor: for ``slow``; None for :data:`DEFAULT_FACTOR`.
        calls: for actions of stores: how many calls go wrong in each worker, at most; None for all.
        each: for ``lag``: seconds of each call; None for :data:`DEFAULT_EACH_S`.
        peer: for actions of networks: the other machine's slot; None for all others.
        mbit: for ``throttle``; None for :data:`DEFAULT_MBIT`.
    """

    action: Action
    target: Target
    index: int
    iteration: int | None
    point: Point = Point.BETWEEN
    microbatch: int | None = None
    bucket: int | None = None
    committed: int | None = None
    seconds: float | None = None
    factor: float | None = None
    calls: int | None = None
    each: float | None = None
    peer: int | None = None
    mbit: float | None = None

    @property
    def lasts_s(self) -> float:
        """The seconds that it lasts, or by which it moves the clock."""
        return DEFAULT_SECONDS[self.action] if self.seconds is None else self.seconds

    @property
    def part(self) -> int | None:
        """The microbatch or the bucket."""
        return self.microbatch if self.bucket is None else self.bucket

    def __str__(self) -> str:
        """The text that :func:`parse_faults` reads."""
        iteration = _ANY if self.iteration is None else self.iteration
        index = _ALL if self.index == ALL else self.index
        text = f"{self.action} {self.target}={index} iteration={iteration} point={self.point}"
        for name in _NUMBERS:
            if (number := getattr(self, name)) is not None:
                text += f" {name}={number}"
        for name in _AMOUNTS:
            if (amount := getattr(self, name)) is not None:
                text += f" {name}={amount:g}"
        return text


def fail_at(
    *,
    iteration: int,
    machine: int | None = None,
    worker: int | None = None,
    point: str = "forward",
    microbatch: int | None = None,
    bucket: int | None = None,
    committed: int | None = None,
    action: str = "kill",
) -> Fault:
    """A fault, in words: ``fail_at(machine=1, iteration=8, point="forward", microbatch=3)``."""
    target, index = (Target.MACHINE, machine) if worker is None else (Target.WORKER, worker)
    if index is None:
        raise UsageError("A fault needs a machine or a worker.")
    return Fault(Action(action), target, index, iteration, Point(point), microbatch, bucket, committed)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults from text; they are separated by semicolons.

    Raises:
        UsageError: with the part that cannot be read.
    """
    return tuple(_parse_one(part.strip()) for part in text.split(";") if part.strip())


def check_faults(text: str, *, machines: int, workers_per_machine: int, networks: bool = False) -> None:
    """Refuse faults of machines and workers that a job does not have.

    Args:
        text: the faults.
        machines: number of the job's machines.
        workers_per_machine: number of workers on each.
        networks: its machines have networks of their own.

    Raises:
        UsageError: with the fault and what there is.
    """
    workers = machines * workers_per_machine
    for fault in parse_faults(text):
        noun, count = ("worker", workers) if fault.target == Target.WORKER else ("machine", machines)
        if fault.index != ALL and not 0 <= fault.index < count:
            raise UsageError(
                f"--inject '{fault}' can never happen: there is no {noun} {fault.index}, "
                f"only {noun}s 0 to {count - 1}."
            )
        if fault.peer is not None and (fault.peer == fault.index or not 0 <= fault.peer < machines):
            raise UsageError(
                f"--inject '{fault}' can never happen: peer={fault.peer} is no other one of the "
                f"{machines} machines."
            )
        if fault.action in OF_NETWORKS and not networks:
            raise UsageError(
                f"--inject '{fault}' needs machines with networks of their own: add --networks "
                "(with --standalone)."
            )


def missed_faults(text: str, struck: Collection[str]) -> tuple[Fault, ...]:
    """The faults in a text that are not among those that struck, which the journal has as text."""
    return tuple(fault for fault in parse_faults(text) if str(fault) not in struck)


def _known(kind: type[StrEnum], value: str, what: str) -> str:
    if value not in set(kind):
        raise ValueError(f"there is no {what} {value!r}, only {', '.join(kind)}")
    return value


def _number_of(target: Target, value: str) -> int:
    if (number := int(value)) < 0:
        raise ValueError(f"there is no {target} {number}")
    return number


def _iteration(value: str) -> int | None:
    return None if value == _ANY else int(value)


def _fault(text: str) -> Fault:
    action, *pairs = text.split()
    facts = dict(pair.split("=", 1) for pair in pairs)
    target = next(Target(name) for name in list(facts) if name in set(Target))
    index = facts.pop(target)
    amounts: dict[str, Any] = {name: float(facts.pop(name)) for name in _AMOUNTS if name in facts}
    fault = Fault(
        Action(_known(Action, action, "action")),
        target,
        ALL if index == _ALL else _number_of(target, index),
        _iteration(facts.pop("iteration")),
        Point(_known(Point, facts.pop("point", Point.BETWEEN), "point")),
        **{name: int(facts.pop(name)) for name in _NUMBERS if name in facts},
        **amounts,
    )
    if facts:
        raise ValueError(f"unknown word {next(iter(facts))!r}")
    _check_amounts(fault)
    return fault


def _check_amounts(fault: Fault) -> None:
    if fault.action in _OF_A_WORKER and fault.target != Target.WORKER:
        raise ValueError(f"{fault.action} needs a worker=, not a {fault.target}=")
    if fault.action in _OF_A_MACHINE and fault.target != Target.MACHINE:
        raise ValueError(f"{fault.action} needs a machine=, not a {fault.target}=")
    if fault.action in OF_STORES and fault.target == Target.AGENT:
        raise ValueError(f"{fault.action} needs a machine= or a worker=, not an agent=")
    if fault.index == ALL and fault.action not in OF_STORES:
        raise ValueError(f"{fault.action} is for one {fault.target}, not for all")
    if fault.seconds is not None and fault.action not in DEFAULT_SECONDS:
        raise ValueError(f"{fault.action} has no seconds=")
    if fault.seconds is not None and fault.seconds <= 0 and fault.action != Action.CLOCK:
        raise ValueError(f"seconds={fault.seconds:g} is not above 0")
    if fault.factor is not None and (fault.action != Action.SLOW or fault.factor <= 1):
        raise ValueError(f"factor={fault.factor:g} is for slow, and above 1")
    if fault.calls is not None and (fault.action not in OF_STORES or fault.calls < 1):
        raise ValueError(f"calls={fault.calls} is for faults of the store, and above 0")
    if fault.each is not None and (fault.action != Action.LAG or fault.each <= 0):
        raise ValueError(f"each={fault.each:g} is for lag, and above 0")
    if fault.peer is not None and fault.action not in _WITH_A_PEER:
        raise ValueError(f"peer={fault.peer} is for {', '.join(sorted(_WITH_A_PEER))}")
    if fault.mbit is not None and (fault.action != Action.THROTTLE or fault.mbit <= 0):
        raise ValueError(f"mbit={fault.mbit:g} is for throttle, and above 0")


def _parse_one(text: str) -> Fault:
    try:
        return _fault(text)
    except (ValueError, KeyError, StopIteration) as error:
        raise UsageError(
            f"The fault {text!r} cannot be read ({error}); write it like "
            "'kill machine=1 iteration=47 point=forward microbatch=3'."
        ) from error
