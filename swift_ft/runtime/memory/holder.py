"""The copies that a worker holds for a worker of another machine; how they come here, and go back.

    PUT /copies/15?owner=1&generation=3&keep=10&digest=...   one of iteration 15; of the others, 10 is kept
    GET /copies/15                                           it is given back; its version is its digest

From a worker's report until training continues nothing changes here, so that its report stays true. A copy
that another generation sends is refused. A loss may give the worker the copies of another one to hold. It
keeps those that it has until the first of these comes. A copy that is found damaged when it is asked for is
dropped: the next report must not name it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from swift_ft.checkpoint.memory_copy import Block, digest_of
from swift_ft.network import JobSecret
from swift_ft.network.peer_client import PeerFile, put
from swift_ft.network.peer_server import COPIES, Content, Sent, Source, SpoiltError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """A copy and the digest that its owner computed."""

    block: Block
    digest: int


class HeldCopies:
    """Copies of one other worker's state, in two blocks of memory that are used again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._copies: dict[int, Held] = {}
        self._owner: int | None = None  # whose they are
        self._unused: list[torch.Tensor] = []
        self._generation: int | None = None  # whose copies are accepted; None in a recovery

    @property
    def owner(self) -> int | None:
        """The worker whose copies these are; None before the first."""
        with self._lock:
            return self._owner

    def open(self, generation: int, *, until: int) -> None:
        """Training continues: accept copies. Those of iterations after ``until`` are of another history."""
        with self._lock:
            self._generation = generation
            for iteration in [i for i in self._copies if i > until]:
                self._drop(iteration)

    def freeze(self) -> tuple[int, ...]:
        """From now on nothing changes. Returns the iterations of which there are copies of the owner."""
        with self._lock:
            self._generation = None
            return tuple(sorted(self._copies))

    def as_sent(self, iteration: int) -> Held | None:
        """The copy of an iteration; None if there is none.

        Raises:
            SpoiltError: its bytes have changed since it came. It is dropped.
        """
        with self._lock:
            found = self._copies.get(iteration)
        if found is None or digest_of(found.block) == found.digest:
            return found
        with self._lock:
            if self._copies.get(iteration) is found:
                self._drop(iteration)
        text = f"the copy of iteration {iteration} in memory is not what was sent"
        _logger.error("%s", text, extra={"event": "copy_damaged"})
        raise SpoiltError(text)

    # ------------------------------------------------------------------------------ asked for by others

    @property
    def source(self) -> Source:
        """The copies as a kind that is served."""
        return Source(self._give, self._take)

    @contextmanager
    def _give(self, name: str) -> Iterator[Content]:
        """Give a copy back."""
        found = self.as_sent(int(name)) if name.isdecimal() else None
        if found is None:
            raise FileNotFoundError(name)
        view = found.block.view
        yield Content(
            len(view), str(found.digest), lambda line, first, count: line.sendall(view[first : first + count])
        )

    def _take(self, sent: Sent) -> bool:
        """Take a copy. False if it comes from another generation.

        Its name is the iteration that has been completed. Its facts: ``owner``, the worker whose state it is
        (copies of another one are dropped); ``generation``, in which it was copied; ``digest``, as its owner
        computed it; and ``keep``, the other iteration of which the owner still needs the copy, if it does.
        """
        owner, generation = sent.facts["owner"], sent.facts["generation"]
        with self._lock:
            if generation != self._generation:
                return False
            keep = sent.facts.get("keep")
            for other in [i for i in self._copies if i != keep or owner != self._owner]:
                self._drop(other)
            self._owner = owner
            data = self._unused.pop() if self._unused else torch.empty(0, dtype=torch.uint8)
        if data.numel() < sent.size:
            data = torch.empty(sent.size, dtype=torch.uint8)
        sent.read(data.numpy().data[: sent.size])
        with self._lock:
            if generation != self._generation:
                self._unused = [data]
                return False
            self._copies[int(sent.name)] = Held(Block(data, sent.size), sent.facts["digest"])
            return True

    def _drop(self, iteration: int) -> None:
        self._unused = [self._copies.pop(iteration).block.data]  # one is enough: the other one is in use


def send_copy(
    address: str,
    secret: JobSecret,
    iteration: int,
    held: Held,
    *,
    owner: int,
    generation: int,
    keep: int | None,
    go_on: Callable[[], bool],
) -> bool:
    """Send a copy. False if the holder is of another generation, or the copy is not needed any more.

    Args:
        address: of the worker that holds it.
        secret: the job's.
        held: the copy.
        owner: the worker whose state it is.
        generation: in which it was made.
        keep: the other iteration of which a copy is still needed.
        go_on: asked before each piece.

    Raises:
        OSError: the holder cannot be reached.
    """
    facts = {"owner": owner, "generation": generation, "digest": held.digest}
    if keep is not None:
        facts["keep"] = keep
    return put(address, secret, f"{COPIES}/{iteration}", facts, held.block.view, go_on)


def fetch_copy(address: str, secret: JobSecret, iteration: int) -> Held:
    """Get a copy back.

    Raises:
        OSError: the holder cannot be reached, or has no such copy.
    """
    copy = PeerFile(address, secret, f"{COPIES}/{iteration}")
    data, at = torch.empty(0, dtype=torch.uint8), 0
    for piece in copy.pieces():
        if not at:
            data = torch.empty(copy.size, dtype=torch.uint8)
        data.numpy().data[at : at + len(piece)] = piece
        at += len(piece)
    return Held(Block(data, at), int(copy.version))
