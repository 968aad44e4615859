"""The example training, in which something is damaged (DAMAGE).

The replacement of worker 1 finds a neighbour's segment damaged (flip, truncate, delete), doubled (double) or
of another run (foreign), or its part of the checkpoint gone (part), or computes something else once
(diverge). Or the first worker 1 cannot write its log any more (writer).
"""

import errno
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_swift

from swift_ft.logging import Record, SegmentWriter, Store, format_segment_name, parse_segment_name
from swift_ft.logging.rotation import SegmentRotation
from swift_ft.logging.segment import open_segment

HOW = os.environ["DAMAGE"]
STORE = Path(sys.argv[sys.argv.index("--store") + 1])
REPLACED = os.environ["RANK"] == "1" and os.environ["SWIFT_LAUNCHED"] != "1"


def survivors_segments(store: Path) -> list[Path]:
    """The segments of worker 1's neighbours; they appear when the survivors have flushed."""
    for _ in range(600):
        found = [sorted((store / f"log/rank-0000{rank}").glob("*.arrow")) for rank in (0, 2)]
        if all(found):
            return [paths[-1] for paths in found]
        threading.Event().wait(0.05)
    raise TimeoutError("the survivors did not flush")


def damage(how: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "double":
        name = parse_segment_name(path.name)
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


def diverge_once() -> None:
    build_stage = train_swift.build_stage

    def build(*args: object) -> object:
        module = build_stage(*args)

        def perturb(module: object, inputs: object, output: object) -> object:
            handle.remove()
            return output + 1e-3

        handle = module.register_forward_hook(perturb)
        return module

    train_swift.build_stage = build


if REPLACED:
    if HOW == "diverge":
        diverge_once()
    elif HOW == "part":
        for part in STORE.glob("checkpoints/*/rank-00001*"):
            shutil.rmtree(part)
    elif HOW != "writer":
        damage(HOW, survivors_segments(STORE)[0])
elif HOW == "writer" and os.environ["RANK"] == "1":
    break_the_writer()
train_swift.main()
