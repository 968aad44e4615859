"""The estimates that papers use instead of the exact makespan, and a lower bound that is nearly it.

Oobleck's equations 1 to 4 and AutoHet's equation 1 are sums over stages. Neither is a bound of the time under
1F1B: Oobleck's is too small where an early stage is far slower than others, AutoHet's too large where it is
slower at all. ``compare`` of ``swift-plan`` shows both beside the exact time.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.planning.layout.makespan import StageTime


def oobleck_ns(stages: Sequence[StageTime], microbatches: int) -> int:
    """Oobleck (SOSP '23), equations 1 to 4, with all stages' times in T1 and T3.

    T1 = sum of w. T2 = (N - S + k - 1) w_k, and T3 = sum of w from k on, with w the time of a stage, forward
    and backward, k the slowest stage and N the number of microbatches. (As printed, the right half of a
    division begins one layer late.)
    """
    times = [stage.compute_ns for stage in stages]
    slowest = times.index(max(times))
    middle = (microbatches - len(times) + slowest - 1) * times[slowest]
    return sum(times) + middle + sum(times[slowest:])


def autohet_ns(stages: Sequence[StageTime], microbatches: int) -> int:
    """AutoHet (arXiv 2512.20953), equation 1 of one pipeline, without the gradients' synchronisation.

    The sum of all stages' times, and the slowest one's for each further microbatch.
    """
    times = [stage.compute_ns for stage in stages]
    return sum(times) + (microbatches - 1) * max(times)


def lower_bound_ns(stages: Sequence[StageTime], microbatches: int, transfer_ns: int = 0) -> int:
    """A lower bound of the time under 1F1B, mostly equal to it.

    Stage k computes N w_k. Before its first pass come the forward passes of the stages before it, and after
    its last one their backward passes: A = the sum of w before k. Between its first forward and backward pass
    lies R = the sum of w behind k, of which it fills no more than the S-1-k forward passes that its order has
    there. Between its last forward and backward pass lies R again, and it fills S-1-k backward passes. Where
    these two gaps are apart,

        A + N w_k + max(0, R - (S-1-k) f_k) + max(0, R - (S-1-k) b_k)

    of any stage is a bound. With both gaps positive it is the sum of Oobleck's T1, T2 and T3.
    """
    behind, bound = 0, 0
    for j, stage in enumerate(reversed(stages)):  # j stages behind it
        ahead = 2 * transfer_ns if j else 0
        behind += ahead
        bound = max(bound + ahead + stage.compute_ns, own_bound_ns(stage, behind, j, microbatches))
        behind += stage.compute_ns
    return bound


def own_bound_ns(stage: StageTime, behind_ns: int, stages_behind: int, microbatches: int) -> int:
    """The bound of :func:`lower_bound_ns` for one stage, without the stages before it."""
    first = max(0, behind_ns - stages_behind * stage.forward_ns)
    last = max(0, behind_ns - stages_behind * stage.backward_ns)
    gaps = first + last if microbatches > stages_behind + 1 else max(first, last)
    return microbatches * stage.compute_ns + gaps
