"""The buffers of a DDP model (running statistics), the same on all replicas after each backward pass.

By default DDP copies the first replica's buffers to all others at the beginning of the next forward pass. If
the first replica died before that, they would be gone. So they travel with the gradients here: no replica
completes an iteration without them. Each has them before the optimizer steps, because what the script derives
from them, such as an average of the model (EMA), has to be the same on all replicas, too.

Private parts used (tested on torch 2.11 to 2.14):

- of a DDP model: ``require_forward_param_sync``, ``parameters_to_ignore``, ``buffer_hook``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.versions.buffer_sync import keeps_buffers_equal
from swift_ft.torch_core import outputs
from swift_ft.torch_core.buffers import copy_all
from swift_ft.torch_core.outputs import Output

_PLACE = "the first replica's buffers"


class BufferSync:
    """Takes the first replica's buffers to all others, once in each backward that averages gradients.

    Args:
        model: stock DDP.

    Attributes:
        equal: DDP keeps the replicas' buffers equal, as far as the last backward shows.
        flat: the bytes of all buffers, on their way.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model: Any = model
        self._work: dist.Work | None = None
        self._buffers: list[torch.Tensor] = []
        self._is_source = False
        self.equal = False
        self.flat = torch.empty(0)

    @property
    def due(self) -> bool:
        """Whether DDP synchronises buffers in its next forward pass."""
        return bool(self._model.require_forward_param_sync)

    @property
    def come_first(self) -> bool:
        """Whether the next forward pass gives all replicas the first one's, if there are any."""
        model = self._model
        return self.due and keeps_buffers_equal(model) and any(True for _ in model.module.buffers())

    def forget(self) -> None:
        """Drop what has not been adopted."""
        self._work, self._buffers = None, []

    def begin(self, group: dist.ProcessGroup) -> dist.Work | None:
        """Begin to send or receive; None where replicas keep buffers of their own.

        All forward passes that count are done, and the collective comes before those of the gradients.
        """
        self.forget()
        model = self._model
        buffers = [b for n, b in model.module.named_buffers() if n not in model.parameters_to_ignore]
        # After a forward pass without DDP's synchronisation, as in a pipeline, the flag is False.
        self.equal = bool(
            keeps_buffers_equal(model)
            and model.require_forward_param_sync
            and not hasattr(model, "buffer_hook")
            and group.size() > 1
            and len({buffer.device for buffer in buffers}) <= 1
        )
        if not self.equal or not buffers:
            return None
        # Long elements first: then the bytes of each buffer are aligned for its dtype.
        self._buffers = sorted(buffers, key=lambda buffer: -buffer.element_size())
        self.flat = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in self._buffers])
        self._is_source = group.rank() == 0
        if self._is_source and outputs.are_watched():
            outputs.show(Output(_PLACE, {"buffers": self.flat}, tuple(dist.get_process_group_ranks(group))))
        with beginning(group):
            self._work = dist.broadcast(self.flat, group=group, group_src=0, async_op=True)
        return self._work

    def wait(self) -> None:
        """Wait for what travels; on a device, only the current stream waits.

        Raises:
            RuntimeError: as torch does, if communication failed.
        """
        if self._work is not None:
            self._work.wait()

    def adopt(self) -> None:
        """At the end of a backward pass, give this replica's module what has arrived."""
        self.wait()
        if self._work is not None and not self._is_source:
            if outputs.are_watched():
                outputs.show(Output(_PLACE, {"buffers": self.flat}, received=True))
            parts = self.flat.split([buffer.nbytes for buffer in self._buffers])
            values = [p.view(b.dtype).view(b.shape) for p, b in zip(parts, self._buffers, strict=True)]
            copy_all(self._buffers, values)
        self.forget()
