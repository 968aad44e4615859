"""Ranges of tensors that one worker fetches from another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from swift_ft.checkpoint.state_payload import StatePath, TensorKind
from swift_ft.errors import DamagedCheckpointError
from swift_ft.network import JobSecret
from swift_ft.network.peer_server import WORLDS, Content, PeerServer, Source, files
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.runtime.worlds.ranges import fetch_ranges, with_ranges

SECRET = JobSecret.generated()
STATE = {
    "models": {
        "model": {
            "a/b.weight": torch.arange(24.0).view(4, 6),
            "half": torch.arange(6).to(torch.bfloat16),
            "step": torch.tensor(7.0),
        }
    },
    **{f"many{number}": torch.full((3,), number) for number in range(150)},
}


@contextmanager
def served(folder: Path, source: Source | None = None) -> Iterator[str]:
    """The state, served at an address."""
    server = PeerServer("127.0.0.1", SECRET, {WORLDS: source or with_ranges(files(folder.joinpath), STATE)})
    try:
        yield server.address
    finally:
        server.close()


def asked(
    tensor: torch.Tensor, path: StatePath, *ranges: tuple[int, int]
) -> tuple[StatePath, TensorKind, Ranges]:
    return path, TensorKind.of(tensor), ranges


def test_only_what_is_asked_for_comes(tmp_path: Path) -> None:
    model = STATE["models"]["model"]  # type: ignore[index]
    weight, half, step = (("models", "model", name) for name in model)
    with served(tmp_path) as address:
        found = fetch_ranges(
            address,
            SECRET,
            [
                asked(model["a/b.weight"], weight, (1, 3), (2, 6)),
                asked(model["half"], half, (4, 6)),
                asked(model["step"], step),
                asked(model["half"], half, (3, 3)),
            ],
        )
    expected = [model["a/b.weight"][1:3, 2:6], model["half"][4:6], model["step"], model["half"][3:3]]
    assert all(map(torch.equal, found, expected))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]


def test_many_are_asked_for_in_several_requests(tmp_path: Path) -> None:
    wanted = [asked(STATE[f"many{n}"], (f"many{n}",), (1, 3)) for n in range(150)]  # type: ignore[arg-type]
    with served(tmp_path) as address:
        found = fetch_ranges(address, SECRET, wanted)
    assert [tensor.tolist() for tensor in found] == [[n, n] for n in range(150)]


def test_files_are_served_beside_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    source = with_ranges(files(tmp_path.joinpath), STATE)
    with source.open("file") as content:
        assert content.size == 7


@pytest.mark.parametrize("path", [("models", "other"), ("models",), ("many0", "more")])
def test_who_does_not_have_it_says_so(tmp_path: Path, path: StatePath) -> None:
    with served(tmp_path) as address, pytest.raises(FileNotFoundError):
        fetch_ranges(address, SECRET, [asked(torch.zeros(3), path, (0, 3))])


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    right = with_ranges(files(tmp_path.joinpath), STATE)

    @contextmanager
    def damaged(name: str) -> Iterator[Content]:
        with right.open(name) as content:
            yield Content(
                content.size, content.version, lambda line, first, count: line.sendall(b"\1" * count)
            )

    with served(tmp_path, Source(damaged)) as address, pytest.raises(DamagedCheckpointError):
        fetch_ranges(address, SECRET, [asked(torch.zeros(3), ("many0",), (0, 3))])
