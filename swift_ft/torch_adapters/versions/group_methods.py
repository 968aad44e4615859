"""Methods of a group and of an operation that not every torch has.

torch 2.13 has the collectives of single tensors. torch 2.14 has a gather of them, windows of memory, groups
that can be reconfigured, and more that can be asked of an operation.
"""

from __future__ import annotations

from collections.abc import Sequence

NOT_IN_ALL = frozenset(
    {
        *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
        *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
        *("_add_ephemeral_timeout", "gather_into_tensor", "gather_single", "get_backend", "new_window"),
        *("get_reconfigure_handle", "reconfigure", "supports_reconfigure", "supports_window"),
        *("_get_sequence_number", "timeout"),  # of an operation
        "_set_sequence_number_for_group",  # up to torch 2.13
    }
)
"""All others are in each torch."""


def those_of(kind: type, names: Sequence[str]) -> tuple[str, ...]:
    """Those of some methods that a class of the installed torch has."""
    return tuple(name for name in names if hasattr(kind, name))
