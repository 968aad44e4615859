"""The copies that a worker holds for a worker of another machine.

    PUT /15?owner=1&generation=3&keep=10&digest=...     a copy of iteration 15; of the others, only 10 is kept
    GET /15                                             it is given back with its digest; 410 if damaged

Each request proves that it comes from a member of the job (`network/http_access.py`), or is refused.

From a worker's report until training continues nothing changes here, so that its report stays true. A copy
that another generation sends is refused. A loss may give the worker the copies of another one to hold. It
keeps those that it has until the first of these comes. A copy that is found damaged when it is asked for is
dropped: the next report must not name it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import torch

from swift_ft.checkpoint.memory_copy import Block, digest_of
from swift_ft.network import JobSecret
from swift_ft.network.token_server import TokenHandler, TokenServer

DIGEST = "X-Digest"

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

    def find(self, iteration: int) -> Held | None:
        """The copy of an iteration."""
        with self._lock:
            return self._copies.get(iteration)

    def give(self, iteration: int) -> Held | None:
        """The copy of an iteration, to be given back. None if no intact copy is held.

        Raises:
            ValueError: its bytes have changed since. It is dropped.
        """
        found = self.find(iteration)
        if found is None or digest_of(found.block) == found.digest:
            return found
        with self._lock:
            if self._copies.get(iteration) is found:
                self._drop(iteration)
        raise ValueError(f"the copy of iteration {iteration} in memory is not what was sent")

    def receive(
        self,
        iteration: int,
        *,
        owner: int,
        generation: int,
        keep: int | None,
        digest: int,
        length: int,
        read: Callable[[memoryview], None],
    ) -> bool:
        """Take a copy. False if it comes from another generation.

        Args:
            iteration: that has been completed.
            owner: the worker whose state it is. Copies of another one are dropped.
            generation: in which it was copied.
            keep: the other iteration of which the owner still needs the copy.
            digest: as its owner computed it.
            length: bytes.
            read: fills the memory that it is given.
        """
        with self._lock:
            if generation != self._generation:
                return False
            for other in [i for i in self._copies if i != keep or owner != self._owner]:
                self._drop(other)
            self._owner = owner
            data = self._unused.pop() if self._unused else torch.empty(0, dtype=torch.uint8)
        if data.numel() < length:
            data = torch.empty(length, dtype=torch.uint8)
        read(data.numpy().data[:length])
        with self._lock:
            if generation != self._generation:
                self._unused = [data]
                return False
            self._copies[iteration] = Held(Block(data, length), digest)
            return True

    def _drop(self, iteration: int) -> None:
        self._unused = [self._copies.pop(iteration).block.data]  # one is enough: the other one is in use


class CopyServer(TokenServer):
    """Takes and gives back copies.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.network.addresses.listen_address`).
        secret: the job's.
        held: where the copies are.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, secret: JobSecret, held: HeldCopies) -> None:
        self.held = held
        super().__init__(host, secret, _Handler, name="swift-copy-server")

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        _logger.error(
            "The request of %s for a copy of its state failed: %s",
            client_address,
            error,
            exc_info=error,
            extra={"event": "copy_request_failed"},
        )


class _Handler(TokenHandler):
    server: CopyServer

    def do_GET(self) -> None:
        if not self.may():
            return
        try:
            found = self.server.held.give(int(self.path.removeprefix("/")))
        except ValueError as error:
            _logger.error("%s", error, extra={"event": "copy_damaged"})  # noqa: TRY400  (the line is enough)
            self.answer(HTTPStatus.GONE)
            return
        if found is None:
            self.answer(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(found.block.length))
        self.send_header(DIGEST, str(found.digest))
        self.end_headers()
        self.connection.sendall(found.block.view)

    def do_PUT(self) -> None:
        if not self.may():
            return
        parts = urlsplit(self.path)
        facts = {name: int(values[0]) for name, values in parse_qs(parts.query).items()}
        taken = self.server.held.receive(
            int(parts.path.removeprefix("/")),
            owner=facts["owner"],
            generation=facts["generation"],
            keep=facts.get("keep"),
            digest=facts["digest"],
            length=int(self.headers["Content-Length"]),
            read=self._read,
        )
        self.answer(HTTPStatus.OK if taken else HTTPStatus.CONFLICT)

    def _read(self, into: memoryview) -> None:
        at = 0
        while at < len(into):
            read = self.rfile.readinto(into[at:])
            if not read:
                raise ConnectionError(f"the sender broke off after {at} of {len(into)} bytes")
            at += read
