"""Measures each layer of a pipeline in the first iterations, and writes the ``layers.json`` of swift-plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.awaited_keys import AwaitedKeys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.costs.equal_devices import on_equal_devices
from swift_ft.costs.layer_profile import LayerProfile, write_layers
from swift_ft.errors import UsageError
from swift_ft.recovery.job_state import State
from swift_ft.runtime.elastic.layer_times import LayerTimes
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_WARM_UP = 2  # iterations: caches, lazy initialisation, the optimizer's state
_MEASURED = 3


class LayerProfiler:
    """Measures the layers of this worker's stages; worker 0 writes those of all stages to a file.

    Args:
        context: the worker's place.
        rendezvous: where worker 0 reads the measurements.
        writer: publishes them there.
        state: what the session protects.
        out: the file; None to publish only.
    """

    def __init__(
        self,
        context: WorkerContext,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        state: TrainingState,
        out: Path | None,
    ) -> None:
        self._rank = context.rank
        self._ranks = range(context.world_size)
        self._rendezvous = rendezvous
        self._writer = writer
        self._state = state
        self._out = out
        self._awaited: AwaitedKeys | None = None
        self._stages: dict[int, LayerTimes] = {}
        self._seen = 0

    def attach(self, stages: Mapping[int, nn.Module]) -> None:
        """Measure the layers of stages, by the stages' indices."""
        self._stages = {index: LayerTimes(module) for index, module in stages.items()}

    def add(self) -> None:
        """Note a completed live iteration."""
        self._seen += 1
        if self._seen == _WARM_UP:
            for times in self._stages.values():
                times.start()
        if self._seen == _WARM_UP + _MEASURED:
            self._publish()
            if self._rank == 0 and self._out is not None:
                self._awaited = AwaitedKeys(self._rendezvous, layer_keys(len(self._ranks)), self._write)

    def close(self, timeout_s: float) -> None:
        """All workers have completed their last iteration: wait for the file."""
        if self._awaited is not None:
            self._awaited.close(timeout_s, "worker 0 to write what the layers cost")

    def _publish(self) -> None:
        found = {}
        for index, times in self._stages.items():
            times.stop()
            found[index] = [asdict(layer) for layer in times.layers([*self._state.optimizers.values()])]
        self._writer.set(store_keys.layers(self._rank), json.dumps(found))

    def _write(self, published: Sequence[bytes]) -> None:
        """Write the file: all workers have measured."""
        assert self._out is not None
        stages: dict[int, list[LayerProfile]] = {}
        for text in published:
            for index, layers in json.loads(text).items():
                stages.setdefault(int(index), [LayerProfile(**layer) for layer in layers])
        try:
            write_layers(joined(stages), self._out)
        except UsageError as error:
            _logger.warning(
                "The layers' costs were not written: %s. Training continues.",
                error,
                extra={"event": "profile_not_written"},
            )


def joined(stages: Mapping[int, list[LayerProfile]]) -> list[LayerProfile]:
    """The layers of all stages, in the pipeline's order, each named after its stage."""
    layers: list[LayerProfile] = []
    for index in sorted(stages):
        first = len(layers)
        for layer in stages[index]:
            shared = None if layer.shared_with is None else first + layer.shared_with
            layers.append(replace(layer, name=f"{index}.{layer.name}", shared_with=shared))
    return layers


class LayerCosts:
    """What each layer of a LayerStack takes, as on a device like most others.

    Args:
        count: layers of the model.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._measured: list[LayerProfile] | None = None  # owner: the thread that calls `take`
        self._layers: list[LayerProfile] | None = None

    def take(self, published: Sequence[bytes]) -> None:
        """What all workers have measured is known from now on, by rank."""
        self._measured = _layers_in(published, self._count)

    def read(self, state: State) -> list[LayerProfile] | None:
        """The layers, in order; None until all workers have measured theirs. From any thread.

        Args:
            state: of the job. The layers are where they were when they were measured.
        """
        if self._layers is None:
            layers = self._measured
            owners = {layer: rank for rank, own in state.layouts.placed.items() for layer in own}
            if layers is not None and len(owners) == self._count:
                self._layers = on_equal_devices(layers, [owners[number] for number in range(self._count)])
        return self._layers


def layer_keys(workers: int) -> list[str]:
    """Where the workers publish what their layers cost, by rank."""
    return [store_keys.layers(rank) for rank in range(workers)]


def _layers_in(published: Sequence[bytes], count: int) -> list[LayerProfile] | None:
    found: dict[int, LayerProfile] = {}
    for text in published:
        for layers in json.loads(text).values():
            found |= {int(layer["name"]): LayerProfile(**layer) for layer in layers}
    return [found[number] for number in range(count)] if len(found) == count else None
