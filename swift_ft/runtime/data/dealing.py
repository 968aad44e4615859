"""Deals the script's global batches to the replicas that the session has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from swift_ft.data.global_batches import GlobalBatches
from swift_ft.data.shares import Change
from swift_ft.errors import UsageError
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.pipeline.shared_layers import SharedLayers


class DealtBatches:
    """Those of the session's state, and what compares them when an iteration is repeated.

    Args:
        check: of the batches of repeated iterations.
        shared: what pipelines of a LayerStack share that are replicas of each other; None elsewhere.
    """

    def __init__(self, parts: Iterable[Any], check: BatchCheck, shared: SharedLayers | None = None) -> None:
        self._batches = [part for part in parts if isinstance(part, GlobalBatches)]
        self._own = any(batches.dealt for batches in self._batches)  # by the script
        self._check = check
        self._shared = shared
        if shared is not None:
            for batches in self._batches:
                batches.weighted = True  # each microbatch counts as much as any other one
                batches.logs = shared.has_first_stage

    def deal(self, replicas: int, replica: int, *, sharded: bool) -> None:
        """Deal them, unless the script has done so.

        Args:
            replicas: that share a batch.
            replica: this worker's number among them.
            sharded: the model is sharded. Whether workers with different shards train on different samples is
                then known to the script only: with FSDP they do, with tensor parallelism they do not.

        Raises:
            UsageError: if batches cannot be dealt, or it is unknown to how many.
        """
        for batches in self._batches:
            if sharded and not batches.dealt:
                raise UsageError(
                    "The model is sharded, so say among how many workers a batch is dealt: "
                    "GlobalBatches(..., replicas=, replica=). With fully_shard these are all workers."
                )
            batches.deal(replicas, replica, self._planned(batches))

    def _planned(self, batches: GlobalBatches) -> tuple[int, ...] | None:
        """The microbatches of each pipeline, where a plan says them."""
        if self._shared is None or not (counts := self._shared.planned):
            return None
        if batches.batch_size % sum(counts):
            raise UsageError(
                f"A global batch of {batches.batch_size} samples is no whole number of the {sum(counts)} "
                "microbatches that the plan gives to all pipelines: make it a multiple."
            )
        return counts

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._batches)

    @property
    def by_session(self) -> bool:
        """Whether there are any, and the session deals all of them."""
        return bool(self._batches) and not self._own

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each replica in the beginning, if there is one data set."""
        return self._batches[0].shares if len(self._batches) == 1 else ()

    @property
    def only(self) -> GlobalBatches | None:
        """The batches of a script that has just one data set, and asks for their weight."""
        if len(self._batches) != 1 or not self._batches[0].weighted:
            return None
        return self._batches[0]

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch; 0 if a global batch is not a whole number of them."""
        if self._shared is None or len(self._batches) != 1:
            return 0
        samples, rest = divmod(self._batches[0].batch_size, self._shared.microbatches)
        return 0 if rest else samples

    def follow(self, changes: Sequence[Change]) -> None:
        """Deal them as the job has agreed on, from the iterations on that it has agreed on."""
        if self._batches:
            self._check.follow(changes)
        if self._shared is not None and (one := self.microbatch):
            counts = [(since, tuple(share // one for share in shares)) for since, shares in changes]
            self._shared.follow(counts)
        for batches in self._batches:
            batches.follow(changes)
