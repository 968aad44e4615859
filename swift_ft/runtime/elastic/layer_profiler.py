"""Measures each layer of a pipeline in the first iterations, and writes the ``layers.json`` of swift-plan."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.awaited_keys import AwaitedKeys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.costs.equal_devices import measured_layers
from swift_ft.costs.layer_profile import LayerProfile, write_layers
from swift_ft.errors import UsageError
from swift_ft.recovery.job_state import State
from swift_ft.torch_adapters.layer_stack import stack_of
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.module_hooks import OwnHook
from swift_ft.torch_core.tensors import tensors_in

_logger = logging.getLogger(__name__)

_WARM_UP = 2  # iterations: caches, lazy initialisation, the optimizer's state
_MEASURED = 3


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
        elif self._rank == 0 and self._out is not None:
            say_too_short(self._out, _WARM_UP + _MEASURED)

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


def say_too_short(out: Path, iterations: int) -> None:
    """Say why there is no file of what was measured."""
    _logger.warning(
        "%s was not written: it takes %d iterations that are trained in one process.",
        out,
        iterations,
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
    """The cost of each layer of a LayerStack, as on a device like most others.

    Args:
        count: layers of the model.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._published: Sequence[bytes] = ()  # owner: the thread that calls `take`
        self._layers: list[LayerProfile] | None = None

    def take(self, published: Sequence[bytes]) -> None:
        """Take over the published measurements of all workers, by rank."""
        self._published = published

    def read(self, state: State) -> list[LayerProfile] | None:
        """The layers, in order; None until all workers have measured theirs. From any thread.

        Args:
            state: of the job. The layers are where they were when they were measured.
        """
        if self._layers is None:
            measured = measured_layers(self._published, state.layouts.placed)
            self._layers = measured if measured is not None and len(measured) == self._count else None
        return self._layers


def layer_keys(workers: int) -> list[str]:
    """The keys of the rendezvous store under which workers publish the costs of their layers, by rank."""
    return [store_keys.layers(rank) for rank in range(workers)]


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """The layers of a module by name: its children, and those of containers among them.

    Children without parameters count as well: they take time. A module without children is a layer itself.
    """
    if stack_of(module) is not None:
        return dict(module.named_children())
    return _inside(module) or {"whole": module}


def _inside(module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        own = _inside(child) if isinstance(child, _CONTAINERS) else {}
        found |= {f"{name}.{inner}": layer for inner, layer in own.items()} or {name: child}
    return found


class LayerTimes:
    """Times the layers of a stage, microbatch by microbatch.

    A forward pass is timed around the layer. A backward pass is timed from when the gradient of the layer's
    output is there to when the gradients of its input and of all its parameters are. On a device, each hook
    waits for the device, so a measured iteration takes longer than others. No value changes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = layers_of(module)
        self._handles: list[RemovableHandle] = []
        self._forward: dict[str, list[int]] = {name: [] for name in self._layers}
        self._backward: dict[str, list[int]] = {name: [] for name in self._layers}
        self._entered: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._touched: dict[str, int] = {}
        self._saved: dict[str, dict[int, int]] = {}
        """Bytes that the first forward pass of each layer keeps, by storage."""
        self._saving: dict[str, torch.autograd.graph.saved_tensors_hooks] = {}
        first = next(module.parameters(), None)
        self._on_device = first is not None and first.device.type != "cpu"

    def start(self) -> None:
        """Measure from now on."""
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(OwnHook(partial(self._enter, name))))
            # Also where the layer raises: the hooks on saved tensors have to end there.
            leave = OwnHook(partial(self._leave, name))
            self._handles.append(layer.register_forward_hook(leave, always_call=True))
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    touched = partial(self._touch, name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(touched))

    def stop(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in list(self._began):
            self._close(name)

    def layers(self, optimizers: list[torch.optim.Optimizer]) -> list[LayerProfile]:
        """The measurements of the layers, in the order of the module: medians in nanoseconds, sizes in bytes.

        Args:
            optimizers: whose state belongs to the layers' parameters.
        """
        owners: dict[int, int] = {}
        found = []
        for index, (name, layer) in enumerate(self._layers.items()):
            # The state of a shared parameter exists once: the first layer that has it counts it.
            own = [p for p in layer.parameters() if owners.setdefault(id(p), index) == index]
            shared = [owners[id(p)] for p in layer.parameters() if owners[id(p)] != index]
            found.append(
                LayerProfile(
                    # A layer that the script never called has no times.
                    forward_ns=round(median(self._forward[name] or [0])),
                    backward_ns=round(median(self._backward[name] or [0])),
                    state_bytes=sum(_state_bytes(p, optimizers) for p in own),
                    activation_bytes=sum(self._saved.get(name, {}).values()),
                    shared_with=shared[0] if shared else None,
                    name=name,
                )
            )
        return found

    def _enter(self, name: str, layer: nn.Module, inputs: Any) -> None:
        # An evaluation is not a part of an iteration.
        if not torch.is_grad_enabled():
            return
        if name not in self._saved:
            kept = self._saved[name] = {}
            # Kept in any case, so they are not counted as activations.
            weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
            self._saving[name] = torch.autograd.graph.saved_tensors_hooks(
                partial(_note, kept, weights), lambda tensor: tensor
            )
            self._saving[name].__enter__()
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._touch, name))
        self._entered[name] = self._now()

    def _leave(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if name in self._saving:
            self._saving.pop(name).__exit__()
        if name not in self._entered:
            return
        self._forward[name].append(self._now() - self._entered.pop(name))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin, name))

    def _begin(self, name: str, _: torch.Tensor) -> None:
        # A tensor's hook outlives stop().
        if self._handles:
            # Nothing marks the end of a backward pass, so the next one's begin does.
            self._close(name)
            self._began[name] = self._touched[name] = self._now()

    def _touch(self, name: str, _: torch.Tensor) -> None:
        if name in self._began:
            self._touched[name] = self._now()

    def _close(self, name: str) -> None:
        if name in self._began:
            self._backward[name].append(self._touched[name] - self._began.pop(name))

    def _now(self) -> int:
        if self._on_device:
            torch.accelerator.synchronize()
        return time.perf_counter_ns()


def _note(kept: dict[int, int], weights: set[int], tensor: torch.Tensor) -> torch.Tensor:
    """Count a tensor that is kept for the backward pass, unless it is a weight."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in weights:
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor


def _state_bytes(parameter: nn.Parameter, optimizers: list[torch.optim.Optimizer]) -> int:
    """A parameter, its gradient, and its state in the optimizers."""
    held = [value for one in optimizers for value in one.state.get(parameter, {}).values()]
    states = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    return parameter.nbytes * (2 if parameter.requires_grad else 1) + states
