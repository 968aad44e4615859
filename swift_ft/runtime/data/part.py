"""A worker's batches as a part of it: a repeated iteration gets the one that it had; replicas share them."""

from __future__ import annotations

import json
import logging

from swift_ft.checkpoint.completeness import Completeness
from swift_ft.config import store_keys
from swift_ft.errors import IncompleteStateError
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.data.digest import BatchDigest
from swift_ft.runtime.data.file_peers import FilePeers
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.ports import Job
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


class DataPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        batches: compares the batches of repeated iterations.
        dealt: the batches that the session deals to the replicas, however many there are.
        files: gives and gets files of samples; None if there are none.
        job: says which checkpoint is committed.
    """

    name = "data"

    def __init__(self, batches: BatchCheck, dealt: DealtBatches, files: FilePeers | None, job: Job) -> None:
        self._batches = batches
        self._dealt = dealt
        self._files = files
        self._job = job

    def begin(self, step: StepInfo) -> None:
        self._batches.begin(step.iteration, self._job.state.checkpoints.committed or 0)

    def interrupted(self, interruption: Interruption) -> None:
        if interruption.in_step:
            self._batches.interrupted()

    def prepare(self, round: Round) -> None:
        self._dealt.follow(round.state.layouts.shares)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


# Checks that a replacement re-created the tensors that are in no state: frozen parameters, masks, tables.
#
# A script that draws them without a seed makes other ones. Replicas that were started together hide that,
# since DDP makes all of them equal at the start; a replacement is alone.


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
