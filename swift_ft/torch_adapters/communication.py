"""Point-to-point operations as torch's pipeline schedules begin them and wait for them.

Private parts used (tested on torch 2.11 to 2.14):

- ``schedules._batch_p2p``, ``schedules._wait_batch_p2p``: how a schedule begins operations and waits for
  them. All waits of this project go the same way, because :class:`.abortable_waits.AbortableWaits` replaces
  ``_wait_batch_p2p``; it is looked up at each call for that reason.
- ``ProcessGroup._device_types``, ``ProcessGroup._get_backend(device)``: the devices that a group's backends
  serve, and these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from swift_ft.torch_adapters.device_waits import wait_for_devices
from swift_ft.torch_adapters.lasting_group import LastingGroup, backends_of
from swift_ft.torch_adapters.lasting_work import LastingWork


def begin(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Begin sends and receives together."""
    return schedules._batch_p2p(list(operations))


def wait_for(works: Sequence[dist.Work]) -> None:
    """Wait for operations. An abort of the group ends the wait.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    schedules._wait_batch_p2p(list(works))


GLOO = "gloo"
_FAKE = "fake"


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which a group takes its tensors: the host if it can, else that of this worker."""
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else _of_this_worker(devices[0])


def silent_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices on which an abort of a group ends waits without an error.

    gloo raises. The fake backend, which torchtitan takes for dimensions of one worker, waits for nothing.
    """
    return [_of_this_worker(device) for device, name in backends_of(group) if name not in (GLOO, _FAKE)]


def take_device(devices: Iterable[torch.device]) -> None:
    """From now on, what has no device of its own goes over one on which this worker has state.

    Nothing changes where the script has named one (``init_process_group(device_id=...)``), or has made one of
    them the current one (``torch.cuda.set_device``).

    Args:
        devices: those that have state.
    """
    found = sorted(
        (one for one in devices if one.type not in ("cpu", "meta")), key=lambda one: one.index or 0
    )
    if not found or LastingGroup.device is not None:
        return
    if torch.accelerator.current_device_index() not in [device.index or 0 for device in found]:
        LastingGroup.device = found[0]


def _of_this_worker(kind: torch.device) -> torch.device:
    """The device of a kind that this worker uses: without a number it is the current one."""
    device = LastingGroup.device
    return device if device is not None and device.type == kind.type else kind


def wait_on_host(works: Sequence[dist.Work], devices: Iterable[torch.device]) -> None:
    """As :func:`wait_for`, until the host may read what has arrived.

    On a device, an operation counts as waited for when what follows it there is behind it. Where an abort is
    silent, it may then have left anything: no length, no state and no digest is taken from that.

    Args:
        works: the operations.
        devices: where tensors are that have arrived, by these operations or by earlier ones.

    Raises:
        RuntimeError: as torch does, if a peer is gone, or because the group was aborted.
    """
    wait_for(works)
    waits = LastingWork.waits
    if waits is not None and waits.silent:
        wait_for_devices(waits, {*devices})


def travels_in_place(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a group that takes tensors on a device can read and write this one's own memory.

    That memory then is the tensor's values, in row-major order.
    """
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.device.type == device.type and not tensor.is_inference()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves a device: ``"gloo"``, ``"nccl"``; empty if none does.

    Args:
        group: as the script has it.
        device: only its kind counts.
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "")
