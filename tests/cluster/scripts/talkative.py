"""The example training with a collective after the optimizer's step: what a session cannot undo."""

import torch
import torch.distributed as dist
import train_swift


class Talkative(torch.optim.AdamW):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))


torch.optim.AdamW = Talkative  # type: ignore[misc]
train_swift.main()
