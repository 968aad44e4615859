"""Short texts between all workers, in the training thread and on the group of the current generation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from swift_ft.torch_adapters.communication import device_of, wait_on_host


def any_of_all(flag: bool) -> bool:
    """Whether any worker says so. All workers call it at the same place.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    return bool(_sum(int(flag)).item())


def texts_of_all(text: str) -> list[str]:
    """The text of each worker, by rank. All workers call it at the same place.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    data = text.encode()
    if dist.get_world_size() == 1:
        return [text]
    device = _device()
    own = torch.tensor([len(data)], device=device)
    sizes = [int(size.item()) for size in _gathered(own)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = _gathered(padded.to(device))
    return [bytes(one[:size].cpu().numpy()).decode() for one, size in zip(found, sizes, strict=True)]


def _sum(value: int) -> torch.Tensor:
    total = torch.tensor([value], device=_device())
    if dist.get_world_size() > 1:
        _wait(dist.all_reduce(total, async_op=True), total)
    return total


def _gathered(own: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    _wait(dist.all_gather(found, own, async_op=True), own)
    return found


def _device() -> torch.device:
    assert dist.group.WORLD is not None
    return device_of(dist.group.WORLD)


def _wait(work: dist.Work | None, tensor: torch.Tensor) -> None:
    assert work is not None
    wait_on_host([work], [tensor.device])
