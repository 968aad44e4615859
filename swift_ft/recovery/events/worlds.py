"""Events of the journal about a next world, which takes the place of the present one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePlanned:
    """Another world is to take over: its workers are started beside those that train (`recovery/worlds.py`).

    Attributes:
        world: its number: one more than that of the last one that was planned.
        machines: by slot.
        command: its script, or module, and the arguments; empty for the same ones as before.
        proof: that the command comes from a member of the job (`network/command_proof.py`), if there is one.
        reload: its workers read the program's files again, instead of those with which the run began.
        plan: its layout, as text that its workers read; empty for the same one as before.
        reason: why, in words.
        asked_by: who asks, in words.
        before_ns: where a policy asks, the time of an iteration in the present world.
        after_ns: the forecast of it in the next one.
        cost_ns: the forecast of the time for which training stands still.
    """

    world: int
    machines: tuple[str, ...]
    command: tuple[str, ...] = ()
    proof: str = ""
    reload: bool = False
    plan: str = ""
    reason: str = ""
    asked_by: str = "somebody"
    before_ns: int = 0
    after_ns: int = 0
    cost_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrepared:
    """A worker of the next world has made its model and waits for its state."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequested:
    """The next world is to take over before an iteration that no worker has begun yet.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        world: the next world's number.
    """

    rank: int
    generation: int
    iteration: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffered:
    """A worker has stopped for the next world, and serves a state until that has taken over.

    Attributes:
        rank: the worker whose state it is.
        generation: the one in which it trained.
        iteration: completed iterations of the state.
        address: ``host:port`` at which it is served.
        digest: of the list of tensors there.
        size: of these tensors, in bytes.
        holder: the worker that serves it, if it is a copy in that one's memory; None if it is its own state.
    """

    rank: int
    generation: int
    iteration: int
    address: str
    digest: str
    size: int = 0
    holder: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken:
    """A worker of the next world has its state.

    Attributes:
        rank: the worker.
        world: its world's number.
        own: bytes that came from its own machine.
        peers: bytes that came from other machines.
    """

    rank: int
    world: int
    own: int = 0
    peers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeGivenUp:
    """The next world does not take over: the present one trains on as if nothing had been planned."""

    world: int
    reason: str
