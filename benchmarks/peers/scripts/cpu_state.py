"""A state for nvidia-resiliency-ext's local checkpoints that has its tensors in the host's memory."""

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class CpuState(BasicTensorAwareStateDict):  # type: ignore[misc]  # it has no types
    """Its base refuses all tensors that are not on a GPU, and loads to one.

    Args:
        state: dictionaries and lists with tensors in them. It is changed by what is done with this object.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They are where they have to be."""
