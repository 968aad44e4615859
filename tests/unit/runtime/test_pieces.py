"""Tensors that both ends know travel in pieces: large ones as they are, small ones joined."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from swift_ft.runtime.helpers.pieces import Arriving, pieces_of, send_plain
from swift_ft.runtime.replicas.buckets import LARGE_BYTES
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for
from tests.support.clean_fork import CLEAN_FORK

HOST = torch.device("cpu")
LARGE = LARGE_BYTES // 4


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((LARGE,), fill),
        "small": torch.full((3, 2), fill),
        "half": torch.full((5,), fill, dtype=torch.bfloat16),
        "transposed": torch.full((LARGE // 8, 16), fill).t(),
        "scalar": torch.full((), fill),
        "none of it": torch.empty(0),
    }


def test_what_arrives_is_what_was_sent() -> None:
    sent, filled = tensors(2.0), tensors(0.0)
    for piece, same in zip(pieces_of(sent, HOST), pieces_of(filled, HOST), strict=True):
        target = same.target([filled[key] for key in same.keys])
        target.copy_(piece.join([sent[key] for key in piece.keys]))
        same.fill([filled[key] for key in same.keys], target)
    assert all(torch.equal(filled[key], tensor) for key, tensor in sent.items())


def test_small_ones_of_a_dtype_are_joined() -> None:
    keys = sorted([*piece.keys] for piece in pieces_of(tensors(0.0)))
    assert keys == [["half"], ["large"], ["small", "scalar", "none of it"], ["transposed"]]


def test_a_large_one_is_not_copied() -> None:
    large = tensors(0.0)["large"]
    (piece,) = pieces_of({0: large})
    assert piece.join([large]).data_ptr() == piece.target([large]).data_ptr() == large.data_ptr()


def test_a_piece_without_values_has_its_size() -> None:
    (piece,) = pieces_of({0: torch.ones(2), 1: torch.ones(3)})
    flat = piece.join([None, torch.ones(3)])
    assert flat.shape == (5,)
    assert piece.views(flat)[1].tolist() == [1.0, 1.0, 1.0]


SIZES = [0, 1, 16 * 2**10 - 9, 16 * 2**10 - 8, 16 * 2**10 - 7, 100_000]


def end(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    link = Link(group, 0, 1)
    for size in SIZES:
        data = bytes(number % 251 for number in range(size))
        if rank == 0:
            wait_for(send_plain(data, link))
        else:
            assert Arriving(link).take() == data
    dist.destroy_process_group()


def test_plain_bytes_of_any_length(tmp_path: Path) -> None:
    ends = [CLEAN_FORK.Process(target=end, args=(rank, tmp_path)) for rank in range(2)]
    for process in ends:
        process.start()
    for process in ends:
        process.join(60)
    assert [process.exitcode for process in ends] == [0, 0]
