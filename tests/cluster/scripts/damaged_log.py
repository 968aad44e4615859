"""The example training, in which something is damaged (DAMAGE).

The replacement of worker 1 finds a neighbour's segment damaged (flip, truncate, delete), doubled (double) or
of another run (foreign), or computes a different value once (diverge). Or its part of the newest checkpoint
is damaged (checkpoint), or its parts of all checkpoints are gone (part), or it diverges while the part of
worker 2, which lives, is damaged (diverge-checkpoint). Or the original worker 1 can no longer write its log
(writer).
"""

import errno
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import train_swift
from gpt import Config
from torch import Tensor, nn

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.config.worker_context import WorkerContext
from swift_ft.logging import parse_segment_name
from swift_ft.logging.format.record import Record
from swift_ft.logging.format.segment import SegmentWriter, format_segment_name, open_segment
from swift_ft.logging.writing.rotation import SegmentRotation
from swift_ft.storage.store import Store
from tests.support.damage import flip
from tests.support.waiting import wait_until

CONTEXT = WorkerContext.from_env()
HOW = os.environ["DAMAGE"]
STORE = Path(sys.argv[sys.argv.index("--store") + 1])
REPLACED = os.environ["RANK"] == "1" and CONTEXT.started_in != 1


def survivors_segments(store: Path) -> list[Path]:
    """The segments of worker 1's neighbours; they appear when the survivors have flushed."""

    def newest() -> list[Path] | None:
        found = [sorted((store / f"log/rank-0000{rank}").glob("*.arrow")) for rank in (0, 2)]
        return [paths[-1] for paths in found] if all(found) else None

    segments: list[Path] = wait_until(newest, "the survivors did not flush")
    return segments


def damage(how: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        flip(path)
    elif how == "double":
        name = parse_segment_name(path.name)
        assert name is not None
        path.with_name(format_segment_name(replace(name, sequence=name.sequence + 1))).write_bytes(data)
    elif how == "foreign":
        rewrite_for_another_run(path)


def rewrite_for_another_run(path: Path) -> None:
    store = Store(path.parents[2])
    directory = f"log/{path.parent.name}"
    identity, records = open_segment(store, f"{directory}/{path.name}", os.environ["TORCHELASTIC_RUN_ID"])
    writer = SegmentWriter(store, directory, replace(identity, run_id="another run"), int(path.name[8:14]))
    for record in records:
        writer.append(record)
    writer.commit()


def break_the_writer() -> None:
    """A disk that answers EIO from the middle of iteration 4 on."""
    write = SegmentRotation.write

    def broken(self: SegmentRotation, record: Record) -> None:
        if record.key.iteration == 4 and record.key.microbatch == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, record)

    SegmentRotation.write = broken


def damage_the_checkpoint(victim: int) -> None:
    """A bit flips in a worker's part of the first checkpoint that this worker is about to load.

    It does once: its replacement would flip the bit back, while the victim may be loading already.
    """
    load, damaged = Checkpointer.load, STORE.parent / "damaged"

    def after_damage(
        self: Checkpointer,
        iteration: int,
        rank: int,
        layout: tuple[int, ...] | None = None,
        workers: int | None = None,
    ) -> None:
        Checkpointer.load = load
        (part,) = STORE.glob(f"checkpoints/{iteration:08d}/rank-{victim:05d}.*/__0_0.distcp")
        if not damaged.exists():
            damaged.touch()
            damage("flip", part)
        load(self, iteration, rank, layout, workers)

    Checkpointer.load = after_damage


def diverge_once() -> None:
    build_stage = train_swift.build_stage

    def build(stage_index: int, num_stages: int, config: Config) -> nn.Module:
        module = build_stage(stage_index, num_stages, config)

        def perturb(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            handle.remove()
            return output + 1e-3

        handle = module.register_forward_hook(perturb)
        return module

    train_swift.build_stage = build


if REPLACED:
    if HOW.startswith("diverge") and CONTEXT.started_in < 4:  # two machines in a row, and then no more
        diverge_once()
    if "checkpoint" in HOW:
        damage_the_checkpoint(victim=2 if HOW.startswith("diverge") else 1)
    elif HOW == "part":
        for part in STORE.glob("checkpoints/*/rank-00001*"):
            shutil.rmtree(part)
    elif HOW in ("flip", "truncate", "delete", "double", "foreign"):
        damage(HOW, survivors_segments(STORE)[0])
elif HOW == "writer" and os.environ["RANK"] == "1":
    break_the_writer()
train_swift.main()
