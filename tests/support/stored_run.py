"""The store of a run that is gone: four workers with a stage each, made without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import write_manifest
from swift_ft.checkpoint.run_record import RECORD, read_record
from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.checkpoint.worker_record import WorkerRecord, write_record
from swift_ft.config.run_config import RunConfig
from swift_ft.coordination.archive import JournalArchive
from swift_ft.launch.rendezvous.setup import setup_of
from swift_ft.logging import Direction, MessageKey, SegmentIdentity
from swift_ft.logging.format.segment import SegmentWriter
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import write_part
from tests.support.log import message

RUN = "run.1-0a1b2c3d"
MICROBATCHES = 2


def pipeline_record(stage: int, *, group: int | None = None, **changes: Any) -> WorkerRecord:
    """The record of a worker with one stage, whose machine is a group by itself."""
    facts: dict[str, Any] = {
        "stages": (stage,),
        "holds": (f"stage {stage}",),
        "pipeline": 0,
        "group": stage if group is None else group,
        "linked": (),
        "microbatches": MICROBATCHES,
        "shapes": {stage: {}},
    }
    return WorkerRecord(**{**facts, **changes})


def make_run(folder: Path, script: Path, *, checkpoints: tuple[int, ...] = (3, 6), until: int = 8) -> Store:
    """Four machines, all of whose logs are there from the first checkpoint on.

    Args:
        folder: of the store.
        script: that the run was started with.
        checkpoints: iterations of the committed checkpoints.
        until: completed iterations at which the logs end.
    """
    store = Store(folder)
    topology = {"machines": 4, "workers": 1, "stages": 4}
    record = {"format": 1, "run_id": RUN, "topology": topology, "earlier": [], "settings": {}}
    store.write_json(RECORD, sealed(record))
    for rank in range(4):
        write_record(store, rank, pipeline_record(rank))
        write_log(store, rank, checkpoints[0], until)
    for iteration in checkpoints:
        save_checkpoint(store, iteration)
    opened = ev.JobOpened(machines=4)
    setup = setup_of(opened, RunConfig(), "script", str(script))
    JournalArchive(store, RUN).write([Entry(0, ev.JobOpened(machines=4, setup=setup), 1.0, "machine 0")])
    return store


def change_record(folder: Path, **changes: Any) -> dict[str, Any]:
    """Let a store say something else of its run, and return all that it says."""
    store = Store(folder)
    record = {**(read_record(store) or {}), **changes}
    store.write_json(RECORD, sealed(record))
    return record


def write_log(store: Store, rank: int, begin: int, until: int, *, microbatches: int = MICROBATCHES) -> None:
    """The messages of one stage to both of its neighbours, one segment per iteration."""
    for sequence, iteration in enumerate(range(begin, until)):
        writer = SegmentWriter(store, log_directory(rank), SegmentIdentity(RUN, rank, 1), sequence)
        for other, direction in ((rank + 1, Direction.FORWARD), (rank - 1, Direction.BACKWARD)):
            for microbatch in range(microbatches) if 0 <= other < 4 else ():
                writer.append(
                    message(MessageKey(iteration, microbatch, direction, rank, other, 0), torch.ones(3))
                )
        writer.commit()


def save_checkpoint(store: Store, iteration: int) -> None:
    """A committed checkpoint of four workers."""
    folder = CheckpointFolder(store)
    parts, digests = {}, {}
    for rank in range(4):
        parts[rank] = folder.part(iteration, rank, 1)
        files = write_part(store, parts[rank], {"weight": torch.full((4,), float(rank + iteration))})
        digests[parts[rank]] = write_manifest(store, parts[rank], files)
    folder.commit(iteration, parts, RUN, digests)
