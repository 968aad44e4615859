"""State arrives as it was sent, whatever memory it is sent from and received into (paper §4)."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift_ft.checkpoint.state_payload import StatePath, StatePayload
from swift_ft.errors import RecoveryError
from swift_ft.runtime.replicas import transfer
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from tests.support.clean_fork import CLEAN_FORK

LARGE = (300, 500)
PLAIN = b"plain values"


def sent() -> dict[StatePath, torch.Tensor]:
    """Large and small tensors of several dtypes, some of them not in order in memory, and empty ones."""
    generator = torch.Generator().manual_seed(3)
    found: dict[StatePath, torch.Tensor] = {
        ("large", str(n)): torch.randn(LARGE, generator=generator) for n in range(40)
    }
    found["large", "transposed"] = torch.randn(LARGE, generator=generator).t()
    found["large", "every other"] = torch.randn(2 * LARGE[0], LARGE[1], generator=generator)[::2]
    found["large", "half"] = torch.randn(700, 500, generator=generator).to(torch.bfloat16)
    found["large", "parameter"] = torch.nn.Parameter(torch.randn(LARGE, generator=generator))
    found["large", "conjugate"] = torch.randn(LARGE, generator=generator, dtype=torch.complex64).conj()
    for n in range(20):
        found["small", str(n)] = torch.randn(7, n, generator=generator)
    found["small", "step"] = torch.tensor(5.0)
    found["small", "mask"] = torch.tensor([True, False, True])
    found["small", "count"] = torch.tensor(2**40)
    found["small", "half"] = torch.randn(3, generator=generator).to(torch.bfloat16)
    return found


def into() -> dict[StatePath, torch.Tensor]:
    """Memory of the same shapes, not laid out as the sender's is."""
    found = {path: torch.zeros(t.shape, dtype=t.dtype) for path, t in sent().items()}
    found["large", "3"] = torch.zeros(LARGE[1], LARGE[0]).t()
    found["large", "parameter"] = torch.nn.Parameter(torch.zeros(LARGE))
    return found


def receive_all(link: Link) -> None:
    memory = into()
    seen: list[bytes] = []
    versions = {path: tensor._version for path, tensor in memory.items()}
    payload = receive(link, lambda kinds: {path: memory[path] for path in kinds}, seen.append)
    assert seen == [payload.plain] == [PLAIN]
    assert list(payload.tensors) == list(sent())
    for path, tensor in sent().items():
        assert payload.tensors[path] is memory[path]
        assert torch.equal(memory[path], tensor), path
        assert memory[path]._version > versions[path], f"{path} does not count as changed"


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def to_one(rank: int) -> None:
    link = Link(world(), 1, 0)
    if rank == 1:
        send(StatePayload(sent(), PLAIN), link)
    else:
        receive_all(link)


def to_all(rank: int) -> None:
    link = Link(world(), 1)
    if rank == 1:
        send(StatePayload(sent(), PLAIN), link)
    else:
        receive_all(link)


def no_tensors(rank: int) -> None:
    link = Link(world(), 0, 1)
    if rank == 0:
        send(StatePayload({}, PLAIN), link)
    else:
        assert receive(link, lambda kinds: {}).plain == PLAIN


def damaged(rank: int) -> None:
    """The sender's memory changes after it took the digest: as if bits had flipped on the way."""
    link = Link(world(), 0, 1)
    if rank == 0:
        right = transfer._digest
        transfer._digest = lambda flat: right(flat) + (flat.numel() == 700 * 500 * 2)
        send(StatePayload(sent(), PLAIN), link)
    else:
        with pytest.raises(RecoveryError, match=r"from worker 0 .*: large.half differ"):
            receive_all(link)


def worker(rank: int, count: int, store: Path, act: Callable[[int], None], results: Any) -> None:
    torch.set_num_threads(1)
    AbortableWaits().install()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=60),
        )
        act(rank)
    except BaseException:
        results.put(traceback.format_exc())
        raise
    results.put("")


@pytest.mark.parametrize(
    ("act", "count"), [(to_one, 2), (to_all, 2), (to_all, 3), (no_tensors, 2), (damaged, 2)]
)
def test_a_transfer(act: Callable[[int], None], count: int, tmp_path: Path) -> None:
    results = CLEAN_FORK.Queue()
    workers = [
        CLEAN_FORK.Process(target=worker, args=(rank, count, tmp_path / "store", act, results))
        for rank in range(count)
    ]
    for process in workers:
        process.start()
    found = [results.get(timeout=60) for _ in workers]
    for process in workers:
        process.join(timeout=60)
        assert process.exitcode is not None
    assert found == [""] * count, "\n".join(found)
