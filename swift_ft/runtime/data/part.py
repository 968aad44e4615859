"""A worker's batches as a part of it: a repeated iteration gets the one that it had; replicas share them."""

from __future__ import annotations

from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.data.file_peers import FilePeers
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.ports import Job


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
