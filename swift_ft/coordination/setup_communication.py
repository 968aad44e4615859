"""Communication of a script before its first step: results are noted, and given to replacements.

A seed that is broadcast, a count that is summed up, a barrier: when a replacement comes there, the others are
in the middle of training. So each worker that gets something notes it in the rendezvous store. A replacement
makes the same calls in the same order, and gets from there what the lost worker got.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch.distributed import DistError

from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.incarnations import has_begun
from swift_ft.coordination.store_client import connect, keys_of_world
from swift_ft.errors import RecoveryError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.script_operations import ALIKE, Operation
from swift_ft.units import format_bytes

LIMIT_BYTES = 64 << 10
"""The most bytes that one operation may give to a worker."""

LIMIT = 1000
"""The most operations that are noted. A script without a session would go on for ever."""


@dataclass(frozen=True, slots=True)
class CannotBeNoted:
    """The first operation that no replacement could be given.

    Attributes:
        operation: torch's name of it.
        reason: why not.
        stack: where the script began it, the innermost frame last.
    """

    operation: str
    reason: str
    stack: traceback.StackSummary


@dataclass
class SetupCommunication:
    """Decides about each operation of the script before its first step.

    See :class:`swift_ft.torch_adapters.script_operations.GroupInterceptor`.

    Attributes:
        rank: this worker.
        workers_per_machine: they are lost and replaced together, so they communicate.
        joins: the other workers are already training.
        rendezvous: returns a client of the rendezvous store.
        refused: what could not be noted; None if all could.
        noted: by key, what this worker has noted for all, in hexadecimal digits.
    """

    rank: int
    workers_per_machine: int
    joins: bool
    rendezvous: Callable[[], RendezvousStore]
    refused: CannotBeNoted | None = None
    noted: dict[str, str] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)
    _left_out: bool = False
    _given_later: bool = False
    _client: RendezvousStore | None = None

    @classmethod
    def of(cls, context: WorkerContext, *, joins: bool) -> SetupCommunication:
        """Of a worker in its place."""

        def rendezvous() -> RendezvousStore:
            client = connect(context.store, context.run_id, admit=has_begun)
            return keys_of_world(client, context.world)

        return cls(context.rank, context.workers_per_machine, joins, rendezvous)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within the block, operations are not the script's own: a replacement does without them."""
        before, self._left_out = self._left_out, True
        try:
            yield
        finally:
            self._left_out = before

    @contextlib.contextmanager
    def given_later(self) -> Iterator[None]:
        """Within the block, operations make what a recovery gives a replacement: to that they give zeros."""
        before, self._given_later = self._given_later, True
        try:
            yield
        finally:
            self._given_later = before

    def begin_unseen(self, name: str, workers: int) -> Callable[[], None] | None:
        """See the protocol. What an operation gives is noted, so each one is looked at."""

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """See the protocol."""
        if self._left_out or self._together(operation):
            return _nothing
        if self._given_later:
            if self.joins:
                self._fill_zeros(operation)
            return None if self.joins else _nothing
        key = self._next_key(operation)
        if self.joins:
            self._fill(operation, key)
            return None
        if self.refused is None and (reason := self._why_not(operation)):
            self.refused = CannotBeNoted(operation.name, reason, traceback.extract_stack())
        if self.refused is not None or not self._is_due(operation):
            return _nothing
        return lambda: self._note(operation, key)

    def _fill_zeros(self, operation: Operation) -> None:
        if operation.name != "send":
            with torch.no_grad():
                for tensor in operation.tensors:
                    tensor.zero_()

    def _together(self, operation: Operation) -> bool:
        others = operation.members if operation.peer is None else (operation.peer,)
        return {rank // self.workers_per_machine for rank in (*others, self.rank)} == {
            self.rank // self.workers_per_machine
        }

    def _next_key(self, operation: Operation) -> str:
        """Names what this worker gets, for its replacement."""
        of = (operation.group, *operation.members, operation.name, operation.peer)
        counted = xxhash.xxh3_64_hexdigest(" ".join(map(str, of)).encode())
        number = self._numbers[counted]
        self._numbers[counted] += 1
        whose = "all" if operation.name in ALIKE else str(self.rank)
        return store_keys.setup_result(counted, number, whose)

    def _is_due(self, operation: Operation) -> bool:
        """One worker notes what all of them get. What a worker sends is not needed."""
        if operation.name in ALIKE:
            return self.rank == operation.members[0]
        return operation.name != "send"

    def _why_not(self, operation: Operation) -> str:
        if operation.name == "recv_anysource":
            return "from whom is not known; name the sender"
        if operation.nbytes > LIMIT_BYTES:
            size, limit = format_bytes(operation.nbytes), format_bytes(LIMIT_BYTES)
            return (
                f"its {size} are more than the {limit} that are noted; read the data on each machine, or "
                "communicate it inside `with step:`"
            )
        if len(self.noted) >= LIMIT:
            return f"{LIMIT} operations before it were noted already; communicate less often"
        return ""

    def _note(self, operation: Operation, key: str) -> None:
        self.noted[key] = b"".join(map(_bytes_in, operation.tensors)).hex()
        self._store().set(key, self.noted[key])

    def _fill(self, operation: Operation, key: str) -> None:
        if operation.name == "send":
            return
        try:
            content = bytes.fromhex(self._store().get(key).decode())
        except DistError as error:
            raise RecoveryError(
                f"worker {self.rank} calls {operation.name} before its first step, and the worker that it "
                "replaces did not: all must make the same calls in the same order"
            ) from error
        if len(content) != operation.nbytes:
            raise RecoveryError(
                f"worker {self.rank} calls {operation.name} before its first step for {operation.nbytes} "
                f"bytes, and the worker that it replaces got {len(content)}: all must make the same calls"
            )
        place = 0
        for tensor in operation.tensors:
            _fill_with(tensor, content[place : place + tensor.nbytes])
            place += tensor.nbytes
        if self._is_due(operation):
            self.noted[key] = content.hex()

    def _store(self) -> RendezvousStore:
        if self._client is None:
            self._client = self.rendezvous()
        return self._client


def _nothing() -> None:
    pass


def _bytes_in(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _fill_with(tensor: torch.Tensor, content: bytes) -> None:
    if content:
        found = torch.frombuffer(bytearray(content), dtype=tensor.dtype).reshape(tensor.shape)
        with torch.no_grad():
            tensor.copy_(found)
