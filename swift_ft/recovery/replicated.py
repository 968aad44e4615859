"""What a worker has in common with its replicas: gradients while all live, state after a loss (paper §4)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store as Rendezvous

from swift_ft.data_parallel import DataParallelHook, Layout
from swift_ft.errors import RecoveryError, UndoError
from swift_ft.optim import UndoableOptimizer
from swift_ft.process_group import GenerationGroup
from swift_ft.recovery.ladder import Transfer
from swift_ft.recovery.plan import Task
from swift_ft.recovery.state import Path, TensorKind, TrainingState
from swift_ft.recovery.transfer import Lane, Parcel, receive, send
from swift_ft.testing.faults import Point

__all__ = ["Replicas"]

_SETTLE_S = 2.0
"""For an all-reduce to notice that its connections are closed."""


class Replicas:
    """Protection by replication.

    Args:
        state: what the session protects.
        rendezvous: where DDP's buckets are published.
        group: makes DDP's group anew in each generation.
        at: told when a point of an iteration is reached (faults of tests).
    """

    def __init__(
        self,
        state: TrainingState,
        rendezvous: Rendezvous,
        group: GenerationGroup,
        at: Callable[[Point, int, int | None], None],
    ) -> None:
        self._state = state
        self._rendezvous = rendezvous
        self._group = group
        self._at = at
        self._layout_key = ""
        self._hook: DataParallelHook | None = None
        self._iteration = 0
        self._windows: dict[str, int] = {}
        self._undone: set[int] = set()
        self._wait_free: list[tuple[UndoableOptimizer, set[torch.Tensor]]] = []

    def attach_ddp(self, model: Any) -> None:
        """See :meth:`swift_ft.Session.attach_ddp`."""
        self._hook = DataParallelHook(
            model,
            self,
            on_layout=self._publish_layout,
            fill_gradients=any(optimizer.wait_free for optimizer in self._undoable().values()),
        )

        self._layout_key = f"ddp/layout/{min(dist.get_process_group_ranks(self._hook.group))}"
        self._group.follow(self._hook.group, self._hook.renew, aborted=self._hook.break_off)

    @property
    def replica(self) -> int:
        """The place of this worker among its replicas, from 0."""
        return self._hook.replica if self._hook is not None else 0

    @property
    def attached(self) -> bool:
        """Whether there is a DDP model."""
        return self._hook is not None

    @property
    def broken(self) -> str | None:
        """What the averaging of gradients failed of in this step, if it did."""
        return self._hook.broken if self._hook is not None else None

    def begin(self, iteration: int) -> None:
        """A step begins."""
        self._iteration = iteration
        self._undone.clear()
        if self._hook is not None:
            self._hook.begin()
        self._note_windows()
        self._wait_free = [
            (optimizer, {p for group in optimizer.param_groups for p in group["params"]})
            for optimizer in self._undoable().values()
            if optimizer.wait_free
        ]

    def settle(self) -> None:
        """After an interruption: wait until nothing changes any more in the background."""
        if self._hook is not None:
            self._hook.settle(_SETTLE_S)

    def updated(self) -> tuple[int, ...]:
        """Indices of the parameters that this iteration has updated so far, and that can be undone."""
        tagged: set[torch.Tensor] = set()
        for name, optimizer in self._undoable().items():
            if optimizer.windows_opened != self._windows.get(name):  # else the tags are the last iteration's
                tagged.update(optimizer.updated)
        return self._indices(tagged)

    def completed(self) -> None:
        """The step is done: its tags are the last iteration's from now on."""
        self._note_windows()

    def undoable(self) -> tuple[int, ...]:
        """Indices of what the last completed iteration updated; none if that cannot be undone."""
        optimizers = self._undoable()
        if len(optimizers) < len(self._state.optimizers):
            return ()
        tagged: set[torch.Tensor] = set()
        for name, optimizer in optimizers.items():
            if optimizer.windows_opened != self._windows.get(name) or not optimizer.updated:
                return ()
            tagged.update(optimizer.updated)
        return self._indices(tagged)

    def undo(self, task: Task) -> None:
        """Take back the updates that the plan names, unless an earlier plan of this step, broken off, did.

        Raises:
            RecoveryError: if one cannot be taken back.
        """
        indices = [index for index in task.undo if index not in self._undone]
        chosen = [self._state.parameters[index] for index in indices]
        for optimizer in {id(o): o for o, _ in chosen}.values():
            assert isinstance(optimizer, UndoableOptimizer)
            try:
                optimizer.undo([p for owner, p in chosen if owner is optimizer])
            except UndoError as error:
                raise RecoveryError(f"the last update cannot be taken back: {error}") from error
        self._undone.update(indices)

    def reset(self, iteration: int, *, warm_up: bool = False) -> None:
        """Go on with the group of now, from the buckets that are in use at an iteration.

        Args:
            iteration: the next one.
            warm_up: a pipeline exchanges shapes in it, whether or not it did before.
        """
        if self._hook is None:
            return
        told = self._rendezvous.check([self._layout_key])
        layout, since, twice = (
            json.loads(self._rendezvous.get(self._layout_key)) if told else (None, 0, False)
        )
        self._hook.reset(
            layout if iteration > since else None, first_alone=twice and iteration == since and not warm_up
        )

    # ----------------------------------------------------------------------------------- state on its way

    def give(self, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Send this worker's state, or some of its parameters, to those who need it."""
        parcel = self._pack_whole() if transfer.parameters is None else self._pack(transfer.parameters)
        send(parcel, Lane(group, transfer.source), self._on_bucket)

    def take_whole(
        self, transfer: Transfer, group: dist.ProcessGroup, aside: bool, keep_buffers: bool
    ) -> None:
        """Receive a whole state.

        Args:
            transfer: from whom.
            group: of the transfer.
            aside: a survivor keeps its state until all is there.
            keep_buffers: running statistics follow from the data that this worker saw, and are no replica's.
        """
        filled: dict[str, Any] = {}

        def place(kinds: dict[Path, TensorKind]) -> Mapping[Path, torch.Tensor]:
            filled.update(self._state.to_load(kinds, aside=aside))
            return {path: _at_path(filled, path) for path in kinds}

        parcel = receive(Lane(group, transfer.source), place, self._on_bucket)
        filled["plain"]["bytes"] = io.BytesIO(parcel.plain)
        if keep_buffers:
            kept = self._state.buffers()
            for name, buffers in kept.items():
                filled["models"][name].update(buffers)
        self._close_windows()
        self._state.take_over(filled)

    def take(self, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Receive some parameters, with their optimizer state."""
        parcel = receive(
            Lane(group, transfer.source),
            lambda kinds: {p: torch.empty(k.shape, dtype=k.dtype) for p, k in kinds.items()},
            self._on_bucket,
        )
        plain = torch.load(io.BytesIO(parcel.plain), weights_only=True)
        indexed = self._state.parameters
        with torch.no_grad():
            for index in transfer.parameters or ():
                optimizer, parameter = indexed[index]
                parameter.copy_(parcel.tensors["parameter", str(index)])
                optimizer.state[parameter] = dict(plain[index]["values"])
        for (kind, index_text, *field), tensor in parcel.tensors.items():
            if kind == "state":
                optimizer, parameter = indexed[int(index_text)]
                on_host = field[0] in plain[int(index_text)]["host"]  # step counters, as a rule
                optimizer.state[parameter][field[0]] = tensor if on_host else tensor.to(parameter.device)

    def _pack_whole(self) -> Parcel:
        saved = self._state.to_save()
        tensors: dict[Path, torch.Tensor] = {
            ("models", n, k): v for n, m in saved["models"].items() for k, v in m.items()
        }
        for name, optimizer in saved["optimizers"].items():
            for parameter, fields in optimizer["state"].items():
                for field, tensor in fields.items():
                    tensors["optimizers", name, "state", parameter, field] = tensor
        return Parcel(tensors, saved["plain"]["bytes"].getvalue())

    def _pack(self, parameters: Sequence[int]) -> Parcel:
        tensors: dict[Path, torch.Tensor] = {}
        plain: dict[int, dict[str, Any]] = {}
        for index in parameters:
            optimizer, parameter = self._state.parameters[index]
            state = optimizer.state.get(parameter, {})
            tensors["parameter", str(index)] = parameter.detach()
            fields = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            tensors.update({("state", str(index), k): v for k, v in fields.items()})
            plain[index] = {
                "values": {k: v for k, v in state.items() if k not in fields},
                "host": [k for k, v in fields.items() if v.device.type == "cpu"],
            }
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        return Parcel(tensors, buffer.getvalue())

    def _on_bucket(self, number: int) -> None:
        self._at(Point.TRANSFER, self._iteration, number)

    # --------------------------------------------------------------- DDP's buckets (`BucketEvents`)

    def reducing(self, bucket: int) -> None:
        """A bucket is full on this worker."""
        self._at(Point.REDUCE, self._iteration, bucket)

    def sent(self, bucket: int) -> None:
        """Its all-reduce has begun."""
        self._at(Point.REDUCING, self._iteration, bucket)

    def reduced(self, bucket: int, parameters: Sequence[torch.Tensor]) -> None:
        """Everybody has contributed, so nobody is before this iteration any more: the undo window closes.

        Where the optimizer is wait-free, its update of these parameters comes right now.
        """
        self._at(Point.REDUCED, self._iteration, bucket)
        for name, optimizer in self._undoable().items():
            if optimizer.windows_opened == self._windows.get(name):
                optimizer.close_undo_window()
        for optimizer, own in self._wait_free:
            optimizer.update([p for p in parameters if p in own])
        self._at(Point.UPDATE, self._iteration, bucket)

    def _undoable(self) -> dict[str, UndoableOptimizer]:
        return {n: o for n, o in self._state.optimizers.items() if isinstance(o, UndoableOptimizer)}

    def _note_windows(self) -> None:
        self._windows = {name: optimizer.windows_opened for name, optimizer in self._undoable().items()}

    def _indices(self, parameters: set[torch.Tensor]) -> tuple[int, ...]:
        return tuple(i for i, (_, p) in enumerate(self._state.parameters) if p in parameters)

    def _close_windows(self) -> None:
        for optimizer in self._undoable().values():
            optimizer.close_undo_window()

    def _publish_layout(self, layout: Layout, twice: bool) -> None:
        """Whoever replaces a worker must add up in the same order, after this iteration and in it."""
        if twice or not self._rendezvous.check([self._layout_key]):  # else this worker replaces one that told
            self._rendezvous.set(self._layout_key, json.dumps([layout, self._iteration, twice]))


def _at_path(nested: Any, path: Path) -> torch.Tensor:
    for key in path:
        nested = nested[key]
    assert isinstance(nested, torch.Tensor)
    return nested
