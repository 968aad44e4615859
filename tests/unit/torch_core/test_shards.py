"""Conformance: what DTensor says of itself, and how one is made of a shard."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from swift_ft.errors import UnsupportedError
from swift_ft.torch_core.shards import describe, local, note_changed, rebuilt
from swift_ft.torch_core.tensors import version_of
from tests.support.shards import sharded, worker_of_mesh


def test_a_shard_is_described_and_rebuilt() -> None:
    with worker_of_mesh(rank=3) as mesh:
        tensor = sharded(torch.arange(15.0).view(5, 3), mesh)
        assert describe(tensor) == {"shape": [5, 3], "offset": [3, 0], "placements": ["R", "S0"]}
        again = rebuilt(local(tensor).clone(), describe(tensor) or {}, tensor)
        assert isinstance(again, DTensor)
        assert again._spec == tensor._spec
        assert torch.equal(local(again), local(tensor))


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), _StridedShard(0, split_factor=2)])
def test_placements(placement: Replicate | Shard) -> None:
    with worker_of_mesh(rank=0) as mesh:
        tensor = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate(), placement], run_check=False)
        again = rebuilt(local(tensor), describe(tensor) or {}, tensor)
        assert isinstance(again, DTensor)
        assert again.placements == tensor.placements


@pytest.mark.parametrize("rank", range(4))
def test_what_was_sharded_twice_is_a_range(rank: int) -> None:
    """First by tensor parallelism, and then by FSDP; a stride alone takes rows here and there."""
    with worker_of_mesh(rank=rank) as mesh:
        whole = torch.arange(8.0)
        twice, strided = (
            [_StridedShard(0, split_factor=2), Shard(0)],
            [_StridedShard(0, split_factor=2), Replicate()],
        )
        first, second = divmod(rank, 2)
        rows = whole.chunk(2)[second].chunk(2)[first]
        tensor = DTensor.from_local(rows, mesh, twice, run_check=False, shape=whole.shape, stride=(1,))
        described = describe(tensor)
        assert described == {"shape": [8], "offset": [int(rows[0])], "placements": ["S0/2", "S0"]}
        tensor = DTensor.from_local(
            torch.ones(4), mesh, strided, run_check=False, shape=whole.shape, stride=(1,)
        )
        assert (describe(tensor) or {})["scattered"]


def test_plain_tensors_stay_what_they_are() -> None:
    plain = torch.ones(2)
    assert local(plain) is plain
    assert describe(plain) is None
    with pytest.raises(UnsupportedError, match="start with the same parallelism"):
        rebuilt(plain, {"shape": [4], "offset": [2], "placements": ["S0"]}, plain)


def test_sums_that_were_not_added_up_are_refused() -> None:
    with worker_of_mesh() as mesh:
        tensor = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()], run_check=False)
        with pytest.raises(UnsupportedError, match="Partial"):
            describe(tensor)


def test_changes_of_the_whole_and_of_the_part_are_counted() -> None:
    with worker_of_mesh() as mesh:
        tensor = sharded(torch.ones(4), mesh)
        versions = [version_of(tensor)]
        tensor.add_(1)
        versions.append(version_of(tensor))
        local(tensor).add_(1)
        versions.append(version_of(tensor))
        note_changed(tensor)
        versions.append(version_of(tensor))
    assert versions == sorted({*versions})
