"""Shares of each global batch: how many samples every replica gets."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.errors import UsageError

Change = tuple[int, tuple[int, ...]]
"""From an iteration on, so many samples for each replica."""


def shares_at(changes: Sequence[Change], iteration: int) -> tuple[int, ...]:
    """The shares of an iteration; empty if it comes before all changes.

    Args:
        changes: the earliest first.
        iteration: that is dealt.
    """
    return next((shares for since, shares in reversed(changes) if since <= iteration), ())


def deal(batch_size: int, unit: int, weights: Sequence[float]) -> list[int]:
    """Shares of a global batch, as near to the weights as whole units allow: largest remainders first.

    Args:
        batch_size: samples.
        unit: samples that stay together, such as a microbatch.
        weights: of the replicas, each above 0: the samples that one takes in a second, for example.

    Returns:
        Samples of each replica, whole units and at least one. Their sum is the global batch.

    Raises:
        UsageError: if there is no such way to deal.
    """
    if unit < 1 or batch_size % unit:
        raise UsageError(
            f"A global batch of {batch_size} samples is no whole number of units of {unit} samples: "
            "make it a multiple."
        )
    units, replicas = batch_size // unit, len(weights)
    if units < replicas:
        raise UsageError(
            f"A global batch of {batch_size} samples, in units of {unit}, cannot be dealt to {replicas} "
            f"replicas: each needs one. Give at least {replicas * unit} samples, or have fewer replicas."
        )
    if not all(weight > 0 for weight in weights):
        raise UsageError(f"The weights of replicas must be above 0, not {list(weights)}.")
    total = sum(weights)
    exact = [units * weight / total for weight in weights]
    shares = [max(1, int(amount)) for amount in exact]
    while sum(shares) > units:  # some got one that is more than their part
        most = max(
            range(replicas), key=lambda replica: (shares[replica] > 1, shares[replica] - exact[replica])
        )
        shares[most] -= 1
    while sum(shares) < units:
        least = max(range(replicas), key=lambda replica: (exact[replica] - shares[replica], -replica))
        shares[least] += 1
    return [share * unit for share in shares]
