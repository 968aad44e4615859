"""Checks that the pipelines of a LayerStack can be replicas of each other, layer by layer."""

from __future__ import annotations

from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.torch_adapters.layer_stack import LayerStack


def check_replicas(stack: LayerStack, workers_per_machine: int) -> None:
    """Refuse what would make copies of a layer differ, and machines that have too many of them.

    Raises:
        UnsupportedError: a layer keeps statistics of the samples that it has seen.
        UsageError: fewer machines have a layer than the script wants to be able to lose.
    """
    for name, module in stack.named_modules():
        if getattr(module, "track_running_stats", False):  # of BatchNorm and InstanceNorm, lazy ones too
            raise UnsupportedError(
                f"Layer {name} is a {type(module).__name__}: each pipeline would have statistics of its own "
                "samples, and the copies of a layer would differ. Use LayerNorm or GroupNorm, or "
                "track_running_stats=False."
            )
    holders = stack.holders(stack.begun)
    for layer, ranks in holders.items():
        machines = {rank // workers_per_machine for rank in ranks}
        if len(machines) <= stack.tolerate:
            raise UsageError(
                f"The {len(ranks)} copies of layer {layer} are on {len(machines)} machine"
                f"{'s' * (len(machines) > 1)}, and tolerate={stack.tolerate} wants one more: let pipelines "
                "begin on machines of their own."
            )
