"""Leaves to Python, at its end, whatever Python finishes: threads, executors, processes, handlers, files.

    ends_itself.py FOLDER [how]

FOLDER gets a folder for each worker. ``how`` says what the last line does.
"""

import atexit
import ctypes
import gzip
import logging.handlers
import multiprocessing
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

rank = int(os.environ.get("RANK", "0"))
folder = Path(sys.argv[1]) / f"rank{rank}"
how = sys.argv[2] if len(sys.argv) > 2 else ""
folder.mkdir(parents=True)


class Summary:
    """Writes itself when nobody needs it any more."""

    def __init__(self) -> None:
        self.file = (folder / "summary.txt").open("w")

    def __del__(self) -> None:
        self.file.write("done")
        self.file.close()


class Upload(threading.Thread):
    """As slow as a bucket far away."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"upload-{number}")
        self.number = number

    def run(self) -> None:
        threading.Event().wait(0.3)
        (folder / f"upload{self.number}.pickle").write_bytes(pickle.dumps(Result(self.number)))


class Result:
    def __init__(self, number: int) -> None:
        self.number = number


def in_a_process(place: Path) -> None:
    threading.Event().wait(0.2)
    place.write_text("by a process")


def end(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "exit below zero":
        sys.exit(-1)
    if how == "exit with words":
        sys.exit("the data set is empty")
    if how == "exit 0":
        sys.exit(0)
    if how == "raise":
        fail()
    if how == "hang":
        threading.Thread(target=threading.Event().wait, name="never-ends").start()


def fail() -> NoReturn:
    raise LookupError("no such key")


atexit.register(lambda: (folder / "atexit.txt").write_text("by a handler"))
summary = Summary()
lines = (folder / "lines.txt").open("w")
packed: Any = gzip.open(folder / "lines.gz", "wt")  # noqa: SIM115  (nobody closes it)
late = logging.FileHandler(folder / "log.txt")
logging.getLogger("late").addHandler(logging.handlers.MemoryHandler(1000, target=late))
for number in range(8):
    for file in (lines, packed):
        file.write(f"line {number}\n")
    logging.getLogger("late").warning("line %d", number)
ctypes.CDLL(None).printf(b"printed by C\n")

if how in ("", "exit 0", "exit"):
    for number in range(3):
        Upload(number).start()
    ThreadPoolExecutor(1).submit(in_a_process, folder / "executor.txt")
    multiprocessing.get_context("fork").Process(target=in_a_process, args=(folder / "process.txt",)).start()
if how == "":
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
    dcp.async_save({"weights": torch.arange(4.0)}, checkpoint_id=folder.parent / "checkpoint")
end(how)
