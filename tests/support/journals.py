"""Journals of small jobs, as their archives hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import RECORD
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_history import GenerationWork, WorkerHistory
from swift_ft.coordination.archive import JournalArchive
from swift_ft.coordination.journal import EventLog
from swift_ft.coordination.journal_reader import JournalReader
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store

ONE_REPLICA_LESS = """
    open 4 on-loss=shrink
    join A B C D
    report all nothing holds=m
    committed 20
    lost B
    plan-change A C D
    prepared all
    report 0,2,3 at 30 holds=m
    offered 0,2,3 at 30
    taken all
    report all at 30 holds=m
"""
"""A scenario: of four replicas three are left, in a smaller world."""

RUN = "job.1-0a1b2c3d"
BEGAN = 1_000_000.0


def machine(slot: int) -> str:
    """The name of the machine in a slot."""
    return f"m-{slot}.0"


def opening(machines: int, *, spares: int = 0, replicas: bool = False, helpers: int = 1) -> list[ev.Event]:
    """A pipeline with a stage on each machine, or replicas of one model; all workers are about to train.

    Args:
        machines: with one worker each.
        spares: machines that wait.
        replicas: every worker has the whole model.
        helpers: among how many workers a replay can be spread.
    """
    events: list[ev.Event] = [ev.JobOpened(machines=machines, max_failures=3, setup=("torch: 2",))]
    events += [
        ev.MachineJoined(machine=machine(slot), address=f"host-{slot}:1", setup=("torch: 2",))
        for slot in range(machines + spares)
    ]
    for rank in range(machines):
        events.append(
            ev.StatusReported(
                rank=rank,
                generation=1,
                iteration=None,
                stages=() if replicas else (rank,),
                holds=("the model",) if replicas else (f"stage {rank}",),
                group=rank,
                max_replay_shards=helpers,
            )
        )
    return events


def checkpoint(machines: int, iteration: int) -> list[ev.Event]:
    """A checkpoint of all workers."""
    parts: list[ev.Event] = [
        ev.PartPersisted(
            rank=rank, iteration=iteration, generation=1, epoch=1, path=f"checkpoints/{iteration:08d}/{rank}"
        )
        for rank in range(machines)
    ]
    return [*parts, ev.CheckpointCommitted(iteration=iteration, epoch=1, keep=2)]


def entries_of(events: list[ev.Event], every_s: float = 1.0) -> tuple[Entry, ...]:
    """Events as entries, one after the other."""
    return tuple(Entry(n, event, BEGAN + n * every_s, "worker 0") for n, event in enumerate(events))


def read_now(journal: EventLog) -> Iterator[Entry]:
    """The entries that a journal has now, since its newest snapshot."""
    reader = JournalReader(journal)
    while (entries := reader.next(0.0)) is not None:
        yield from entries


def store_with(
    folder: str, events: list[ev.Event], *, machines: int, segments: dict[int, list[str]] | None = None
) -> Store:
    """A store as a run leaves it: record, journal, the markers of its checkpoints, and names of segments."""
    store = Store(folder)
    topology = {"machines": machines, "workers": 1, "stages": machines}
    settings = {"checkpoint_every": 10, "log_disk_bytes": 4_000_000}
    record = {"format": 1, "run_id": RUN, "topology": topology, "earlier": ["job.0-ffffffff"]}
    store.write_json(RECORD, sealed({**record, "settings": settings}))
    if events:
        JournalArchive(store, RUN).write(entries_of(events))
    for event in events:
        if isinstance(event, ev.CheckpointCommitted):
            CheckpointFolder(store).commit(event.iteration, {}, RUN, {})
    for rank, names in (segments or {}).items():
        for name in names:
            with store.open_write(f"log/rank-{rank:05d}/{name}") as file:
                file.write(b"x" * 1000)
    return store


RECOVERED = [
    *opening(2, spares=1),  # 0 to 5: the slots are filled in 2, and all are live in 5
    *checkpoint(2, 0),  # 6 to 8
    ev.MachineLost(machine=machine(1), reason="its agent's connection ended"),  # 9: the spare takes its place
    ev.StatusReported(rank=1, generation=2, iteration=None, stages=(1,), holds=("stage 1",), group=1),  # 10
    ev.StatusReported(
        rank=0, generation=2, iteration=4, live=True, stages=(0,), holds=("stage 0",), group=0
    ),  # 11: worker 1 replays 0 to 3
    ev.WorkerReady(rank=0, generation=2),  # 12
    ev.WorkerReady(rank=1, generation=2, replayed=4),  # 13: live
]
ENDED: list[ev.Event] = [
    *(ev.WorkerFinished(rank=rank, generation=2) for rank in (1, 0)),  # 14 and 15
    ev.ScriptExited(machine=machine(0), started_in=1),  # 16
    ev.ScriptExited(machine=machine(2), started_in=2),  # 17
]
"""A run of two machines and a spare that loses machine 1, one event each second."""


FIRST_WORK = GenerationWork(
    1,
    began=BEGAN + 5.5,
    until=BEGAN + 8.3,
    steps=4,
    iteration=4,
    interrupted=BEGAN + 8.4,
    held_back_s=0.25,
    saving_s=0.1,
    log_messages=40,
    log_bytes=4000,
)
"""What worker 0 noted of generation 1."""


def write_history(store: Store, rank: int, *works: GenerationWork, started_in: int = 1) -> None:
    """Write what a worker noted of its work."""
    history = WorkerHistory(RUN, rank, started_in, works)
    WorkerFiles(store, RUN).write(history.file, asdict(history))


def work_of_recovered(store: Store) -> None:
    """What the workers of the run :data:`RECOVERED` noted."""
    second = GenerationWork(2, began=BEGAN + 13.5, until=BEGAN + 14, steps=1, iteration=5, log_bytes=1000)
    write_history(store, 0, FIRST_WORK, second)
    noted = GenerationWork(1, began=BEGAN + 5.75, until=BEGAN + 7, steps=2, iteration=2, log_bytes=500)
    write_history(store, 1, noted)  # and then it was killed
    again = GenerationWork(
        2, began=BEGAN + 13.25, until=BEGAN + 14, steps=1, iteration=5, replayed=4, replay_s=1.5
    )
    write_history(store, 1, again, started_in=2)
