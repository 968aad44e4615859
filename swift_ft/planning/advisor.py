"""Advice on whether logging is worth it for a job (§5.4 of the paper)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative

_FAR_EXCEEDS = 10.0  # "when the logging size far exceeds the model size" (§5.4): the paper gives no number


def bubble_ratio(stages: int, microbatches: int) -> float:
    """Share of an iteration that a device idles under GPipe and 1F1B: ``(p - 1) / (m + p - 1)`` (§2.1)."""
    if stages < 1 or microbatches < 1:
        raise UsageError("stages and microbatches must be at least one")
    return (stages - 1) / (microbatches + stages - 1)


def boundary_bytes(
    *, microbatches: int, microbatch_size: int, sequence: int, hidden: int, element_bytes: int = 4
) -> int:
    """Bytes per iteration over one boundary between two transformer layers, logged in both directions (§5.4).

    ``microbatch_size x hidden x sequence`` elements per microbatch: activations one way, their gradients the
    other.
    """
    return 2 * element_bytes * microbatches * microbatch_size * sequence * hidden


@dataclass(frozen=True)
class LoggingQuestion:
    """The numbers that the advice is based on.

    Attributes:
        log_bytes_per_iteration: bytes logged per iteration over all boundaries.
        busiest_sender_bytes: of these, what the busiest device copies out per iteration.
        model_bytes: parameters and optimizer state.
        checkpoint_interval: iterations between global checkpoints.
        iteration_s: seconds per iteration.
        copy_bandwidth: bytes per second from device to host.
        bubble: share of an iteration that a device idles; :func:`bubble_ratio`, or measured.
        replay_s: expected seconds to replay one iteration of the lost group.
    """

    log_bytes_per_iteration: float
    busiest_sender_bytes: float
    model_bytes: float
    checkpoint_interval: int
    iteration_s: float
    copy_bandwidth: float
    bubble: float
    replay_s: float

    def __post_init__(self) -> None:
        check_not_negative(asdict(self))
        if not (self.iteration_s > 0 and self.copy_bandwidth > 0 and self.model_bytes > 0):
            raise UsageError("iteration_s, copy_bandwidth and model_bytes must be positive")
        if self.bubble >= 1:
            raise UsageError(f"the bubble is {self.bubble}: it is a share of the iteration, below one")


@dataclass(frozen=True)
class Advice:
    """The three comparisons of §5.4, and the conclusion.

    Attributes:
        worth_it: whether all three are in favour of logging.
        log_to_model: log bytes of one iteration divided by the model's.
        copy_s: seconds per iteration to copy the busiest device's messages to the host.
        bubble_s: idle seconds per iteration to do it in.
        replay_to_recompute: a replayed iteration's time divided by a recomputed one's.
        log_bytes: the log's largest size, one checkpoint interval.
        reasons: the comparisons in words.
    """

    worth_it: bool
    log_to_model: float
    copy_s: float
    bubble_s: float
    replay_to_recompute: float
    log_bytes: float
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "reasons": list(self.reasons)}


def advise(question: LoggingQuestion) -> Advice:
    """Compares log and model size, copy and bubble time, replay and recomputation (§5.4)."""
    q = question
    size = q.log_bytes_per_iteration / q.model_bytes
    copy_s, bubble_s = q.busiest_sender_bytes / q.copy_bandwidth, q.bubble * q.iteration_s
    speed = q.replay_s / q.iteration_s
    small, hidden, faster = size <= _FAR_EXCEEDS, copy_s <= bubble_s, speed < 1
    reasons = (
        f"An iteration logs {size:.2g} times the model's bytes: "
        + (
            "this does not far exceed the model."
            if small
            else f"more than {_FAR_EXCEEDS:g} times; checkpoint more often instead."
        ),
        f"Copying takes {copy_s * 1e3:.3g} ms of {bubble_s * 1e3:.3g} ms of bubble per iteration: "
        + ("it is off the critical path." if hidden else "it would slow training down."),
        f"A replayed iteration takes {speed:.0%} of a recomputed one: "
        + ("logging shortens recovery." if faster else "logging does not shorten recovery."),
    )
    return Advice(
        worth_it=small and hidden and faster,
        log_to_model=size,
        copy_s=copy_s,
        bubble_s=bubble_s,
        replay_to_recompute=speed,
        log_bytes=q.log_bytes_per_iteration * q.checkpoint_interval,
        reasons=reasons,
    )
