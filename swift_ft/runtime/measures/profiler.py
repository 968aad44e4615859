"""Measures a few iterations of all workers for the planner (paper §5.3, §5.4)."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.checkpoint.saved_form import bytes_of
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.awaited_keys import AwaitedKeys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.costs.chain_profile import ChainProfile, write_profile
from swift_ft.costs.job import Job, Measured, Worker
from swift_ft.errors import UsageError, first_line
from swift_ft.logging import IterationStats
from swift_ft.observe.waits import waiting
from swift_ft.runtime.elastic.layer_profiler import LayerProfiler, say_too_short
from swift_ft.torch_adapters.communication import begin, device_of, wait_for
from swift_ft.torch_adapters.layer_stack import stack_of
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_WARM_UP = 2  # iterations: caches, lazy initialisation
_MEASURED = 5
_PROBE_BYTES = 4 << 20
_PROBES = 3  # the fastest counts: in the first one, peers may be late


class Profiler:
    """Measures this worker's first iterations, and reads the measurements of all workers.

    A worker's compute time is the time in which it does not wait for a message. A machine is as slow as its
    slowest worker.

    Args:
        context: the worker's place.
        rendezvous: where the measurements of all workers are read.
        writer: publishes this worker's there.
        state: what the session protects.
        save_bytes_per_s: returns the bandwidth of this worker's last checkpoint write; None before the first.
        snapshot_every: returns the iterations between two memory checkpoints; None without them.
        archive: called with what this worker has measured, whenever there is news.
    """

    def __init__(
        self,
        context: WorkerContext,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        state: TrainingState,
        save_bytes_per_s: Callable[[], float | None],
        snapshot_every: Callable[[], int | None],
        archive: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self._context = context
        self._rendezvous = rendezvous
        self._writer = writer
        self._state = state
        self._save_bytes_per_s = save_bytes_per_s
        self._snapshot_every = snapshot_every
        self._archive = archive
        self._place = Worker(holds=())
        self._seen: list[IterationStats] = []
        self._link: float | None = None
        self._copy: float | None = None
        self._measured: Measured | None = None
        out = context.config.profile_out
        self._out = Path(out) if out and context.rank == 0 else None
        self._awaited: AwaitedKeys | None = None
        self._layers: LayerProfiler | None = None

    def attach_stages(self, stages: Mapping[int, nn.Module]) -> None:
        """Measure the layers of this worker's stages as well, if that was asked for, or if they can move."""
        out = self._context.config.layers_out
        if out or any(stack_of(module) is not None for module in stages.values()):
            self._layers = LayerProfiler(
                self._context, self._rendezvous, self._writer, self._state, Path(out) if out else None
            )
            self._layers.attach(stages)

    def publish_place(self, worker: Worker) -> None:
        """Publish this worker's stages, parts and pipeline."""
        self._place = worker
        place = {"holds": worker.holds, "stages": worker.stages, "pipeline": worker.pipeline}
        self._rendezvous.set(store_keys.place(self._context.rank), json.dumps(place))

    def measure(self) -> str | None:
        """Time a short copy to the host, and a short message to the next machine.

        All workers call it right after a group was formed, when nothing else is being sent.

        Returns:
            Why the measurement was interrupted; None if it was not.
        """
        context = self._context
        first = next((p for module in self._state.modules.values() for p in module.parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copy = _PROBE_BYTES / _fastest(lambda: host.copy_(probe))
        if context.world_size == context.workers_per_machine:
            return None
        assert dist.group.WORLD is not None
        sent, got = probe.to(device_of(dist.group.WORLD)), host.to(device_of(dist.group.WORLD))
        ahead = (context.rank + context.workers_per_machine) % context.world_size
        behind = (context.rank - context.workers_per_machine) % context.world_size

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, sent, ahead), dist.P2POp(dist.irecv, got, behind)]
            wait_for(begin(operations))
            got[-1].item()  # waits for the device

        try:
            self._link = _PROBE_BYTES / _fastest(exchange)
        except RuntimeError as error:
            return first_line(error)
        return None

    def add(self, account: IterationStats, sent: Mapping[int, int] | None) -> None:
        """Note a completed live iteration.

        Args:
            account: what its log cost.
            sent: payload bytes to each other machine; None without a pipeline.
        """
        if self._layers is not None:
            self._layers.add()
        if len(self._seen) < _WARM_UP + _MEASURED:
            self._seen.append(account)
            if len(self._seen) == _WARM_UP + _MEASURED:
                self._publish(self._middle(sent or {}, self._seen[_WARM_UP:]), pipeline=sent is not None)
                if self._out is not None:
                    self._awaited = AwaitedKeys(self._rendezvous, self._keys(), self._write)
        elif self._measured is not None and (again := self._now(self._measured)) != self._measured:
            self._publish(again, pipeline=sent is not None)

    def publish_last(self, sent: Mapping[int, int] | None) -> float | None:
        """Publish the last iteration alone, since no more will come.

        Args:
            sent: payload bytes to each other machine; None without a pipeline.

        Returns:
            The seconds that it took; None if there was none.
        """
        if not self._seen:
            return None
        # How fast the store is that stands in for the script's says nothing.
        measured = replace(self._middle(sent or {}, self._seen[-1:]), save_bytes_per_s=None)
        self._publish(measured, pipeline=sent is not None)
        return measured.iteration_s

    def close(self, timeout_s: float) -> None:
        """All workers have completed their last iteration: wait for the files that are asked for."""
        if self._layers is not None:
            self._layers.close(timeout_s)
        if self._awaited is not None:
            self._awaited.close(timeout_s, "worker 0 to write the profile")
        elif self._out is not None:
            say_too_short(self._out, _WARM_UP + _MEASURED)

    def _write(self, published: Sequence[bytes]) -> None:
        assert self._out is not None
        try:
            write_profile(self._profile_of([json.loads(text) for text in published]), self._out)
        except UsageError as error:
            _logger.warning(
                "The profile was not written to %s: %s Training continues.",
                self._out,
                error,
                extra={"event": "profile_not_written"},
            )

    def _now(self, measured: Measured) -> Measured:
        """With what becomes known, or changes, after the first iterations."""
        return replace(
            measured, save_bytes_per_s=self._save_bytes_per_s(), snapshot_every=self._snapshot_every()
        )

    def _middle(self, sent: Mapping[int, int], counted: Sequence[IterationStats]) -> Measured:
        measured = Measured(
            iteration_s=median(account.step_s for account in counted),
            compute_s=median(max(0.0, account.step_s - account.bubble_s) for account in counted),
            bubble_s=median(account.bubble_s for account in counted),
            sent=dict(sent),
            state_bytes=bytes_of(self._state.to_save()),
            link_bytes_per_s=self._link,
            copy_bytes_per_s=self._copy,
        )
        return self._now(measured)

    def _publish(self, measured: Measured, pipeline: bool) -> None:
        self._measured = measured
        facts = {**asdict(measured), "in_pipeline": pipeline}
        self._writer.set(store_keys.profile(self._context.rank), json.dumps(facts))
        self._archive(replace(self._place, measured=measured))

    def read(self) -> ChainProfile:
        """The job's profile.

        Raises:
            UsageError: if not all workers have measured enough iterations, there is no pipeline, or machines
                that are not neighbours send messages to each other: the planner only knows chains.
        """
        if not self._complete():
            raise UsageError(
                f"There is no profile yet: it takes {_WARM_UP + _MEASURED} iterations on every worker."
            )
        with waiting("the rendezvous store to say what all workers have measured"):
            published = self._rendezvous.multi_get(self._keys())
        return self._profile_of([json.loads(text) for text in published])

    def _profile_of(self, facts: Sequence[Mapping[str, Any]]) -> ChainProfile:
        """The profile, from what each worker has published."""
        context = self._context
        if not all(one["in_pipeline"] for one in facts):
            raise UsageError("There is no profile without a pipeline: it describes a pipeline's messages.")
        machines = context.world_size // context.workers_per_machine
        compute_s, between = [0.0] * machines, Counter[tuple[int, int]]()
        for rank, one in enumerate(facts):
            slot = rank // context.workers_per_machine
            compute_s[slot] = max(compute_s[slot], one["compute_s"])
            for other, size in one["sent"].items():
                between[min(slot, int(other)), max(slot, int(other))] += size
        far = [pair for pair in between if pair[1] != pair[0] + 1]
        if far:
            raise UsageError(
                f"Machines {far[0][0]} and {far[0][1]} send messages to each other but are not neighbours: "
                "the planner only knows chains, such as those of 1F1B and GPipe."
            )
        return ChainProfile(tuple(compute_s), tuple(between[slot, slot + 1] for slot in range(machines - 1)))

    def job(
        self, *, groups: tuple[int, ...], checkpoint_every: int, snapshot_every: int | None = None
    ) -> Job:
        """The job as its workers have published it, with their measurements so far.

        Raises:
            UsageError: if not all workers have published their place in time.
        """
        context = self._context
        limit_s = context.config.report_timeout_s
        try:
            places = [store_keys.place(rank) for rank in range(context.world_size)]
            with waiting("all workers to ask for a plan", limit_s, flag="--report-timeout"):
                self._rendezvous.wait(places, timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            raise UsageError(
                f"Not all workers have asked for a plan, or begun their first step, within {limit_s:g} s: "
                "if only some workers call session.plan(), the others must go on to their steps."
            ) from error
        workers = self._read_workers()
        return Job(
            workers, context.workers_per_machine, checkpoint_every, groups, snapshot_every=snapshot_every
        )

    def workers(self) -> list[Worker] | None:
        """All workers with what they have measured; None until all have. From any thread."""
        return list(self._read_workers()) if self._complete() else None

    def _read_workers(self) -> tuple[Worker, ...]:
        """All workers, whose places are known, with what they have measured so far."""
        ranks, store = range(self._context.world_size), self._rendezvous
        keys = dict(enumerate(self._keys()))
        if not self._complete():
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        with waiting("the rendezvous store to say what workers hold and have measured"):
            places = store.multi_get([store_keys.place(rank) for rank in ranks])
            facts = store.multi_get([*keys.values()]) if keys else []
        known = dict(zip(keys, facts, strict=True))
        return tuple(_worker_of(json.loads(place), known.get(rank)) for rank, place in enumerate(places))

    def _keys(self) -> list[str]:
        return [store_keys.profile(rank) for rank in range(self._context.world_size)]

    def _complete(self) -> bool:
        return bool(self._rendezvous.check(self._keys()))


def _worker_of(place: Mapping[str, Any], published: bytes | None) -> Worker:
    measured = Measured()
    if published is not None:
        facts = json.loads(published)
        facts["sent"] = {int(slot): size for slot, size in facts["sent"].items()}
        del facts["in_pipeline"]
        measured = Measured(**facts)
    return Worker(tuple(place["holds"]), tuple(place["stages"]), place["pipeline"], measured)


def _fastest(probe: Callable[[], object]) -> float:
    """Seconds of the fastest of a few probes."""
    taken = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        probe()
        taken.append(time.perf_counter() - began)
    return max(min(taken), 1e-9)
