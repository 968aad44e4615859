"""The shapes of a stage's messages: records since torch 2.12, tensors before.

``described(stage)``
    They as JSON, for both the same: ``inputs``, ``outputs``, ``input_grads``, ``output_grads``, each a list
    with ``shape``, ``stride``, ``dtype`` and ``requires_grad`` of each tensor, or None. Instead of all that,
    None for tensors that JSON cannot describe (DTensor).
``prepare(stage, shapes, microbatches=..., has_backward=...)``
    Makes a stage start from known shapes, without its neighbours.
``fresh(stage)``
    Returns what puts a stage back to how it is now, so that torch exchanges shapes as it would have done now.

Private part used (tested on torch 2.11 to 2.14): whether ``torch.distributed.pipelining._utils`` has
``_StageMeta``.
"""

from __future__ import annotations

from torch.distributed.pipelining import _utils

if hasattr(_utils, "_StageMeta"):
    from swift_ft.torch_adapters.versions.shapes_as_records import described, fresh, prepare
else:
    from swift_ft.torch_adapters.versions.shapes_as_tensors import described, fresh, prepare

__all__ = ["described", "fresh", "prepare"]
