"""Deals the script's global batches to the replicas that the session has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swift_ft.data.global_batches import GlobalBatches
from swift_ft.errors import UsageError

__all__ = ["deal_batches"]


def deal_batches(parts: Iterable[Any], replicas: int, replica: int, *, sharded: bool) -> bool:
    """Deal those of the session's state, unless the script has done so.

    Args:
        parts: of the state.
        replicas: that share a batch.
        replica: this worker's number among them.
        sharded: the model is sharded. Whether workers with different shards train on different samples is
            then known to the script only: with FSDP they do, with tensor parallelism they do not.

    Returns:
        Whether there were any.

    Raises:
        UsageError: if batches cannot be dealt, or it is unknown to how many.
    """
    found = [part for part in parts if isinstance(part, GlobalBatches)]
    for batches in found:
        if sharded and not batches.dealt:
            raise UsageError(
                "The model is sharded, so say among how many workers a batch is dealt: "
                "GlobalBatches(..., replicas=, replica=). With fully_shard these are all workers."
            )
        batches.deal(replicas, replica)
    return bool(found)
