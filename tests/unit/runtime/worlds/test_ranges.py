"""Tensors of a state that one worker fetches from another one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind
from swift_ft.errors import DamagedCheckpointError
from swift_ft.network import JobSecret
from swift_ft.network.peer_server import WORLDS, Content, PeerServer, Source
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.runtime.worlds.ranges import OfferedPart, OfferedTensors, source_of

SECRET = JobSecret.generated()
MODEL = {
    "a/b.weight": torch.arange(24.0).view(4, 6),
    "half": torch.arange(6).to(torch.bfloat16),
    "step": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "large": torch.arange(200_000.0),
}
STATE: dict[str, Any] = {
    "models": {"model": MODEL},
    "many": {f"{number}": torch.full((3,), number) for number in range(1500)},
    "plain": {"bytes": io.BytesIO(b"plain\nbytes")},
}
RANK = 3
"""The worker whose state it is."""


def the_state() -> OfferedTensors:
    return OfferedTensors(StatePayload.of(STATE))


@contextmanager
def served(source: Source | None = None, digest: str = "") -> Iterator[OfferedPart]:
    """The state, served to a reader."""
    offered = the_state()
    server = PeerServer("127.0.0.1", SECRET, {WORLDS: source or source_of({RANK: offered})})
    try:
        yield OfferedPart(server.address, RANK, SECRET, digest or offered.digest)
    finally:
        server.close()


def asked(path: StatePath, *ranges: tuple[int, int]) -> tuple[StatePath, TensorKind, Ranges]:
    tensor: Any = STATE
    for key in path:
        tensor = tensor[key]
    return path, TensorKind.of(tensor), ranges


def of_model(name: str, *ranges: tuple[int, int]) -> tuple[StatePath, TensorKind, Ranges]:
    return asked(("models", "model", name), *ranges)


def test_only_what_is_asked_for_comes() -> None:
    with served() as part:
        found = part.fetch(
            [
                of_model("a/b.weight", (1, 3), (2, 6)),
                of_model("half", (4, 6)),
                of_model("step"),
                of_model("half", (3, 3)),
            ]
        )
    expected = [MODEL["a/b.weight"][1:3, 2:6], MODEL["half"][4:6], MODEL["step"], MODEL["half"][3:3]]
    assert all(map(torch.equal, found, expected))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert part.received == 8 * 4 + 2 * 2 + 4


def test_many_are_asked_for_in_several_requests() -> None:
    with served() as part:
        found = part.fetch([asked(("many", f"{number}"), (1, 3)) for number in range(1500)])
    assert [tensor.tolist() for tensor in found] == [[n, n] for n in range(1500)]


def test_all_of_it_fills_a_state_however_that_is_laid_out() -> None:
    model = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    plain = io.BytesIO()
    into: dict[str, Any] = {
        "models": {"model": model},
        "many": {f"{number}": torch.zeros(3, dtype=torch.float64) for number in range(1500)},
        "plain": {"bytes": plain},
    }
    at = model["large"].data_ptr()
    with served() as part:
        assert part.kinds()["models", "model", "half"] == (torch.bfloat16, (6,))
        part.fill(into)
    assert all(torch.equal(model[name], tensor) for name, tensor in MODEL.items())
    assert model["large"].data_ptr() == at
    assert [into["many"][f"{n}"].tolist() for n in (3, 1499)] == [[3.0] * 3, [1499.0] * 3]
    assert plain.getvalue() == b"plain\nbytes"


def test_another_shape_is_refused() -> None:
    with served() as part, pytest.raises(ValueError, match=r"many.0 is \(3,\) there and \(4,\) here"):
        part.fill({"many": {"0": torch.zeros(4)}})


def test_who_does_not_have_it_says_so() -> None:
    with served() as part:
        part.kinds()
        part._numbers["many", "0"] = 10_000
        with pytest.raises(FileNotFoundError):
            part.fetch([asked(("many", "0"), (0, 3))])


@pytest.mark.parametrize("sent", ["head", "tensors"])
def test_a_flipped_bit_is_found(sent: str) -> None:
    right = source_of({RANK: the_state()})

    @contextmanager
    def damaged(name: str) -> Iterator[Content]:
        with right.open(name) as content:
            send = (lambda line, first, count: line.sendall(b"\1" * count)) if sent in name else content.send
            yield Content(content.size, content.version, send)

    with served(Source(damaged)) as part, pytest.raises(DamagedCheckpointError):
        part.fetch([asked(("many", "0"), (0, 3))])


def test_another_number_of_bytes_is_refused() -> None:
    right = source_of({RANK: the_state()})

    @contextmanager
    def short(name: str) -> Iterator[Content]:
        with right.open(name if name == f"{RANK}/head" else f"{RANK}/tensors/0") as content:
            yield content

    with served(Source(short)) as part, pytest.raises(DamagedCheckpointError, match="96 bytes came instead"):
        part.fetch([asked(("many", "0"), (0, 3))])


def test_the_state_is_that_of_the_journal() -> None:
    with served(digest="0" * 32) as part, pytest.raises(DamagedCheckpointError):
        part.kinds()
