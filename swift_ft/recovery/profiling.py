"""What a few iterations tell the planner, of all workers (paper §5.3, §5.4)."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store as Rendezvous
from torch.distributed.pipelining import schedules

from swift_ft.config import WorkerContext
from swift_ft.errors import UsageError
from swift_ft.logging import Account
from swift_ft.planning.job import Job, Measured, Worker
from swift_ft.profile import Profile, write_profile
from swift_ft.recovery.state import TrainingState, bytes_of
from swift_ft.recovery.transfer import device_of

__all__ = ["Profiler"]

_WARM_UP = 2  # iterations: caches, lazy initialisation
_MEASURED = 5
_PROBE_BYTES = 4 << 20
_PROBES = 3  # of which the fastest counts: the first one meets peers that are not there yet


class Profiler:
    """Measures this worker's first iterations, and reads what all have measured.

    A worker computes while it does not wait for a message. A machine takes as long as its slowest worker.

    Args:
        context: the worker's place.
        rendezvous: where everybody publishes.
        state: what the session protects.
        save_bytes_per_s: at which its last part of a checkpoint was written; None before that.
    """

    def __init__(
        self,
        context: WorkerContext,
        rendezvous: Rendezvous,
        state: TrainingState,
        save_bytes_per_s: Callable[[], float | None],
    ) -> None:
        self._context = context
        self._rendezvous = rendezvous
        self._state = state
        self._save_bytes_per_s = save_bytes_per_s
        self._seen: list[Account] = []
        self._link: float | None = None
        self._copy: float | None = None
        self._measured: Measured | None = None
        self._out = Path(context.profile_out) if context.profile_out and context.rank == 0 else None

    def tell_place(self, worker: Worker) -> None:
        """Publish what is on this worker."""
        place = {"holds": worker.holds, "stages": worker.stages, "pipeline": worker.pipeline}
        self._rendezvous.set(_place(self._context.rank), json.dumps(place))

    def measure(self) -> str | None:
        """Time a short copy to the host, and a short message to the next machine.

        Everybody calls it, when a group was just formed and nothing else is on its way.

        Returns:
            Why that was broken off; None if it was not.
        """
        context = self._context
        first = next((p for module in self._state.modules.values() for p in module.parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copy = _PROBE_BYTES / _fastest(lambda: host.copy_(probe))
        if context.world == context.workers:
            return None
        assert dist.group.WORLD is not None
        sent, got = probe.to(device_of(dist.group.WORLD)), host.to(device_of(dist.group.WORLD))
        ahead = (context.rank + context.workers) % context.world
        behind = (context.rank - context.workers) % context.world

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, sent, ahead), dist.P2POp(dist.irecv, got, behind)]
            schedules._wait_batch_p2p(dist.batch_isend_irecv(operations))  # as it is now: see `waits.py`
            got[-1].item()  # a device says so when it is done

        try:
            self._link = _PROBE_BYTES / _fastest(exchange)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def add(self, account: Account, sent: Mapping[int, int] | None) -> None:
        """A live iteration is over.

        Args:
            account: of its log.
            sent: payload bytes to each other machine; None without a pipeline.
        """
        if len(self._seen) < _WARM_UP + _MEASURED:
            self._seen.append(account)
            if len(self._seen) == _WARM_UP + _MEASURED:
                self._publish(self._middle(sent or {}), pipeline=sent is not None)
        elif self._measured is not None and self._measured.save_bytes_per_s != self._save_bytes_per_s():
            again = replace(self._measured, save_bytes_per_s=self._save_bytes_per_s())
            self._publish(again, pipeline=sent is not None)
        if self._out is not None and self._measured is not None and self._complete():
            try:
                write_profile(self.read(), self._out)
            except (UsageError, OSError) as error:
                warnings.warn(
                    f"No profile is written to {self._out}: {error} Training goes on.", stacklevel=3
                )
            self._out = None

    def _middle(self, sent: Mapping[int, int]) -> Measured:
        counted = self._seen[_WARM_UP:]
        return Measured(
            iteration_s=median(account.step_s for account in counted),
            compute_s=median(max(0.0, account.step_s - account.bubble_s) for account in counted),
            bubble_s=median(account.bubble_s for account in counted),
            sent=dict(sent),
            state_bytes=bytes_of(self._state.to_save()),
            save_bytes_per_s=self._save_bytes_per_s(),
            link_bytes_per_s=self._link,
            copy_bytes_per_s=self._copy,
        )

    def _publish(self, measured: Measured, pipeline: bool) -> None:
        self._measured = measured
        facts = {**asdict(measured), "in_pipeline": pipeline}
        self._rendezvous.set(_key(self._context.rank), json.dumps(facts))

    def read(self) -> Profile:
        """The job's profile.

        Raises:
            UsageError: not everybody has measured enough; there is no pipeline; or machines that are no
                neighbours send messages to each other: the planner knows chains only.
        """
        context = self._context
        if not self._complete():
            raise UsageError(
                f"There is no profile yet: it takes {_WARM_UP + _MEASURED} iterations on every worker."
            )
        facts = [self._facts(rank) for rank in range(context.world)]
        if not all(one["in_pipeline"] for one in facts):
            raise UsageError("There is no profile without a pipeline: it is about the messages of one.")
        machines = context.world // context.workers
        compute_s, between = [0.0] * machines, Counter[tuple[int, int]]()
        for rank, one in enumerate(facts):
            slot = rank // context.workers
            compute_s[slot] = max(compute_s[slot], one["compute_s"])
            for other, size in one["sent"].items():
                between[min(slot, int(other)), max(slot, int(other))] += size
        far = [pair for pair in between if pair[1] != pair[0] + 1]
        if far:
            raise UsageError(
                f"Machines {far[0][0]} and {far[0][1]} send messages to each other, and are no neighbours: "
                "the planner knows chains only, such as 1F1B and GPipe make."
            )
        return Profile(tuple(compute_s), tuple(between[slot, slot + 1] for slot in range(machines - 1)))

    def job(self, *, groups: tuple[int, ...], checkpoint_every: int) -> Job:
        """The job as all have told it, with what they have measured so far.

        Raises:
            UsageError: not everybody has told its place in time.
        """
        context = self._context
        limit_s = context.timeouts.report_s
        try:
            places = [_place(rank) for rank in range(context.world)]
            self._rendezvous.wait(places, timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            raise UsageError(
                f"Not all workers have asked for a plan, or begun their first step, within {limit_s:g} s: "
                "worker 0 alone may ask, but then the others must go on to their steps."
            ) from error
        workers = tuple(self._worker(rank) for rank in range(context.world))
        return Job(workers, context.workers, checkpoint_every, groups)

    def _worker(self, rank: int) -> Worker:
        place = json.loads(self._rendezvous.get(_place(rank)))
        measured = Measured()
        if self._rendezvous.check([_key(rank)]):
            facts = self._facts(rank)
            facts["sent"] = {int(slot): size for slot, size in facts["sent"].items()}
            del facts["in_pipeline"]
            measured = Measured(**facts)
        return Worker(tuple(place["holds"]), tuple(place["stages"]), place["pipeline"], measured)

    def _facts(self, rank: int) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._rendezvous.get(_key(rank)))
        return facts

    def _complete(self) -> bool:
        return bool(self._rendezvous.check([_key(rank) for rank in range(self._context.world)]))


def _fastest(probe: Callable[[], object]) -> float:
    """Seconds, of the fastest of a few."""
    taken = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        probe()
        taken.append(time.perf_counter() - began)
    return max(min(taken), 1e-9)


def _key(rank: int) -> str:
    return f"profile/{rank}"


def _place(rank: int) -> str:
    return f"place/{rank}"
