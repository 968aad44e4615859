"""Checks that a replacement re-created the tensors that are in no state: frozen parameters, masks, tables.

A script that draws them without a seed makes other ones. Replicas that were started together hide that, since
DDP makes all of them equal at the start; a replacement is alone.
"""

from __future__ import annotations

import json
import logging

from swift_ft.checkpoint.completeness import Completeness
from swift_ft.config import store_keys
from swift_ft.errors import IncompleteStateError
from swift_ft.runtime.data.digest import BatchDigest
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


def check_remade(completeness: Completeness, rendezvous: RendezvousStore, rank: int) -> None:
    """Compare what the script has made with what the first worker of this rank had. Before the first step.

    Raises:
        IncompleteStateError: if a frozen parameter is another one. For a buffer there is a warning, since it
            may be memory without a content yet.
    """
    digests = {name: BatchDigest(tensor).value for name, tensor in completeness.made_by_script()}
    if not digests:
        return
    key = store_keys.made(rank)
    if not rendezvous.check([key]):
        rendezvous.set(key, json.dumps(digests))
        return
    known = json.loads(rendezvous.get(key))
    for name, digest in digests.items():
        if known.get(name, digest) == digest:
            continue
        if "'s parameter " in name:
            raise IncompleteStateError(
                f"{name} is frozen, not in Session(state), and not what the first worker of rank {rank} had: "
                "call torch.manual_seed() before the model is made, or put the parameter into the state."
            )
        _logger.warning(
            "%s is not in a state_dict(), and not what the first worker of rank %d had at its start: if its "
            "content matters, register it with persistent=True",
            name,
            rank,
            extra={"event": "buffer_differs", "rank": rank},
        )
