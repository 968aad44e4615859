"""A worker's replicas: they share gradients in each iteration, and state after a loss (paper §4)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.state_payload import (
    StatePath,
    StatePayload,
    TensorKind,
    fresh,
    tensor_at,
)
from swift_ft.checkpoint.step.places import Place
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.errors import RecoveryError, SwiftError
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.replicas.own_variables import OwnVariables
from swift_ft.runtime.replicas.payloads import parameters_payload, put_parameters, whole_payload
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.runtime.replicas.updates import Updates
from swift_ft.runtime.state_proof import StateProof
from swift_ft.torch_adapters.communication import device_of
from swift_ft.torch_adapters.ddp import DataParallelHook
from swift_ft.torch_adapters.ddp_buckets import Layout
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC
from swift_ft.torch_core.module_hooks import OwnHook

_DRAIN_S = 2.0
"""For an all-reduce to notice that its connections are closed."""


class Replicas:
    """Protection by replication.

    Args:
        state: what the session protects.
        rendezvous: where DDP's buckets are published, in the keys of this world.
        run_keys: the keys of the whole run, in which the next world finds them.
        group: makes DDP's group again in each generation.
        proof: says whether received state is compared with what was sent.
        rank: this worker.

    Attributes:
        updates: of the running iteration and the last one.
        own_variables: compares the script's variables with those of replicas.
        same_stage: ranks of this worker and those that have the same stage in other pipelines of a
            LayerStack, whose scripts keep the same variables.
        first: the lowest rank of this worker and its replicas.
    """

    def __init__(
        self,
        state: TrainingState,
        rendezvous: RendezvousStore,
        run_keys: RendezvousStore,
        group: GenerationGroup,
        proof: StateProof,
        rank: int,
    ) -> None:
        self._rank = self.first = rank
        self._state = state
        self.updates = Updates(state)
        self._rendezvous = rendezvous
        self._run_keys = run_keys
        self._group = group
        self._proof = proof
        self._layout_key = self._run_layout_key = self._own_buffers_key = ""
        self._own_buffers_published = False
        self._hook: DataParallelHook | None = None
        self._sharded: nn.Module | None = None
        self._holders: list[int] = []  # ranks of those that have the same state or shards, with this worker
        self._iteration = 0
        self._prepared: StatePayload | None = None
        self.own_variables: OwnVariables | None = None  # the session gives it
        self.same_stage: Sequence[int] = ()  # so does it this

    def take_waited_s(self) -> float:
        """Seconds since the last call in which this worker waited for the gradients of other replicas."""
        return self._hook.take_waited_s() if self._hook is not None else 0.0

    def take_since_averages_s(self) -> float:
        """Seconds since all gradients were averages, which take no longer for a larger part of a batch."""
        return self._hook.take_since_averages_s() if self._hook is not None else 0.0

    def attach_ddp(self, model: Any) -> nn.Module:
        """See :meth:`swift_ft.Session.attach_ddp`. Returns the module within DDP."""
        self._hook = DataParallelHook(
            model,
            self.updates.reduced,
            on_layout=self._publish_layout,
            on_backward_ended=self.updates.backward_ended,
        )

        # Asked once: in a recovery there is no group, and who the replicas are stays known.
        self._holders = dist.get_process_group_ranks(self._hook.group)
        self.first = first = min(self._holders)
        self._layout_key = store_keys.ddp_layout(first)
        self._run_layout_key = store_keys.ddp_layout_of(self._hook.signature)
        self._own_buffers_key = store_keys.ddp_own_buffers(first)
        self._group.follow(self._hook.group, self._hook.renew, on_abort=self._hook.abort)
        self._proof.explain_by(self._why_apart)
        inner: nn.Module = self._hook.model.module
        return inner

    def attach_fsdp(self, model: nn.Module, ranks: list[int]) -> None:
        """See :meth:`swift_ft.Session.attach_fsdp`.

        Args:
            model: sharded, and nothing of it gathered.
            ranks: of the workers that hold the same shards, this one among them.
        """
        self._sharded, self._holders = model, ranks

    def watch_inputs(self, on_batch: Callable[[Any], None]) -> None:
        """Show what the script gives to the model, before each forward."""

        def given(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():  # it would become a part of the graph
                try:
                    on_batch((args, kwargs))
                except SwiftError as error:
                    step_failures.note(error)
                    raise

        self.model.register_forward_pre_hook(OwnHook(given), with_kwargs=True)

    @property
    def replica(self) -> int:
        """The place of this worker among its replicas, from 0."""
        return self._holders.index(self._rank) if self._holders else 0

    @property
    def ranks(self) -> list[int]:
        """Of this worker and its replicas, or of all that have the same shards; empty without a model."""
        return self._holders

    @property
    def count(self) -> int:
        """The number of replicas, with this worker."""
        return max(1, len(self._holders))

    @property
    def model(self) -> nn.Module:
        """The DDP model, or the sharded one."""
        model = self._hook.model if self._hook is not None else self._sharded
        assert model is not None
        return model

    @property
    def attached(self) -> bool:
        """Whether there is a model of which other workers may hold the same."""
        return self._hook is not None or self._sharded is not None

    @property
    def sharded(self) -> bool:
        """Whether replicas are of shards. Then all workers must continue from the same iteration."""
        return self._sharded is not None

    @property
    def broken(self) -> str | None:
        """Why the averaging of gradients failed in this step, if it did."""
        return self._hook.broken if self._hook is not None else None

    @property
    def equal_buffers(self) -> bool:
        """Whether DDP keeps the replicas' buffers equal. Otherwise each has statistics of its own data."""
        return self._hook is not None and self._hook.buffers.equal

    def forward_alone(self) -> None:
        """No other replica is there to give this one its buffers: they stay as they are."""
        if self._hook is not None:
            setattr(self._hook.model, BUFFER_SYNC, False)

    @property
    def averaged(self) -> list[str]:
        """Names of the parameters whose gradients are averaged. None if some of these are sparse."""
        return self._hook.averaged if self._hook is not None else []

    @property
    def takes_first_buffers(self) -> bool:
        """Whether a forward pass that begins gives this replica the first one's buffers."""
        return self._hook is not None and self.replica > 0 and self._hook.buffers.come_first

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins."""
        self._iteration = iteration
        self._prepared = None
        self.updates.begin(iteration)
        if self._hook is not None:
            self._hook.begin(iteration, updates_early=self.updates.come_early)

    def compare_variables(self, iteration: int) -> None:
        """Before a live step: see :meth:`OwnVariables.begin`."""
        if self.own_variables is not None:
            self.own_variables.begin(iteration, self.ranks or self.same_stage)

    def note_variables(self, iteration: int) -> None:
        """A checkpoint is about to be saved: note what a replacement has to have of this worker's own."""
        if self.own_variables is not None:
            self.own_variables.note(iteration, self.ranks or self.same_stage)

    def kept_variables(
        self, iteration: int, *, own_at: int | None, shared: Callable[[Place], bool] = lambda _: False
    ) -> AbstractContextManager[None]:
        """Within the block, what this worker's script has for itself stays, or is what the lost worker had.

        Args:
            iteration, own_at, shared: see :meth:`OwnVariables.kept`.
        """
        if self.own_variables is None:
            return nullcontext()
        ranks = self.ranks or self.same_stage
        return self.own_variables.kept(ranks, iteration, own_at=own_at, shared=shared)

    def drain(self) -> None:
        """After an interruption, wait until no background thread changes the state any more."""
        if self._hook is not None:
            self._hook.drain(_DRAIN_S)

    def completed(self) -> None:
        """The step is complete.

        Raises:
            UsageError: a wait-free optimizer has updated parameters, and its step was skipped.
        """
        self.updates.completed()
        if self._hook is not None and not self._hook.buffers.due and not self._own_buffers_published:
            # In a pipeline DDP synchronises in its very first forward pass only, and must not do so again.
            self._rendezvous.set(self._own_buffers_key, str(self._iteration + 1))
            self._own_buffers_published = True

    def reset(self, iteration: int) -> None:
        """Continue with the current group, from the buckets that are in use at an iteration.

        Args:
            iteration: the next one.
        """
        if self._hook is None:
            return
        layout, since = self._published_layout()
        own_buffers = self._rendezvous.check([self._own_buffers_key])
        own_since = int(self._rendezvous.get(self._own_buffers_key)) if own_buffers else math.inf
        self._hook.reset(
            layout if iteration > since else None,
            sync_buffers=iteration < own_since,
        )

    def _published_layout(self) -> tuple[Layout | None, int]:
        """The buckets, and the iteration of the first backward, which had others."""
        if not self._rendezvous.check([self._layout_key]):
            # The next world goes on with those of the world before, if it has as many such replicas.
            if self._rendezvous is self._run_keys or not self._run_keys.check([self._run_layout_key]):
                return None, 0
            self._rendezvous.set(self._layout_key, self._run_keys.get(self._run_layout_key).decode())
        layout, since = json.loads(self._rendezvous.get(self._layout_key))
        return layout, since

    # ------------------------------------------------------------------------------------------ state

    def prepare_state(self, *, whole: bool, unchanged: bool = False) -> None:
        """Have the state ready for the first :meth:`send_state`. It must not change in between.

        Args:
            whole: that one is of a whole state. Nothing is prepared for others.
            unchanged: the state is the same as at the last call.
        """
        if not whole:
            self._prepared = None
        elif self._prepared is None or not unchanged:
            self._prepared = whole_payload(self._state)
            _ = self._prepared.header  # kept

    def send_state(self, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Send this worker's state, or some of its parameters, to the workers that need it."""
        payload, self._prepared = self._prepared, None
        if transfer.parameters is not None:
            payload = parameters_payload(self._state, transfer.parameters)
        send(payload or whole_payload(self._state), self._link(transfer, group))

    def recv_state(
        self, transfer: Transfer, group: dist.ProcessGroup, aside: bool, keep_buffers: bool
    ) -> None:
        """Receive a whole state.

        Args:
            transfer: names the source.
            aside: receive into new tensors, so that a survivor keeps its own state until all is there.
            keep_buffers: keep the buffers of this worker's model, such as running statistics of its own data.
        """
        filled: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        models = self._state.local_models()  # before the source has begun

        def allocate(kinds: dict[StatePath, TensorKind]) -> Mapping[StatePath, torch.Tensor]:
            filled.update(self._state.to_load(kinds, aside=aside, models=models))
            return {path: tensor_at(filled, path) for path in kinds}

        receive(
            self._link(transfer, group),
            allocate,
            meanwhile=lambda data: plain.update(self._state.unpack(data)),
        )
        if keep_buffers:
            kept = self._state.buffers(self.model)
            for name, buffers in kept.items():
                filled["models"][name].update(buffers)
        self.updates.forget()
        self._state.take_over(filled, plain)
        if self._proof.on and (names := self._state.differing_from(filled)):
            raise RecoveryError(
                f"the state from worker {transfer.source} is not the one that it sent: {listed(names)} differ"
            )

    def recv_parameters(self, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Receive some parameters, with their optimizer state."""
        payload = receive(self._link(transfer, group), fresh)
        put_parameters(self._state, transfer.parameters or (), payload)

    def _link(self, transfer: Transfer, group: dist.ProcessGroup) -> Link:
        alone = len(transfer.targets) == 1 and device_of(group).type == "cpu"
        # To one receiver in half of a broadcast's time; on a device it would need connections of its own.
        target = transfer.targets[0] if alone else None
        return Link(group, transfer.source, target, iteration=self._iteration)

    def _why_apart(self, names: Sequence[str]) -> str | None:
        """Why replicas hold different values of some tensors, if that is DDP's own doing."""
        assert self._hook is not None
        frozen = {*self._hook.frozen_at_first}
        named = ((part, *pair) for part, m in self._state.modules.items() for pair in m.named_parameters())
        never = {f"{part}.{name.removeprefix('module.')}" for part, name, p in named if p in frozen}
        if not (apart := [name for name in names if name in never]):
            return None
        return (
            f"DDP averages no gradients of {listed(apart)}, which required none when it was constructed: "
            "freeze parameters after DistributedDataParallel(..., find_unused_parameters=True), or never "
            "thaw them"
        )

    # --------------------------------------------------------------------------------- DDP's buckets

    def _publish_layout(self, layout: Layout) -> None:
        """A replacement must add gradients up in the same order, in this iteration and after it."""
        if not self._rendezvous.check([self._layout_key]):  # else an earlier worker of this rank did
            for store, key in ((self._rendezvous, self._layout_key), (self._run_keys, self._run_layout_key)):
                store.set(key, json.dumps([layout, self._iteration]))
