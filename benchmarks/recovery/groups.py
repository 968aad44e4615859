"""How a generation's group ends and begins: anew, as swift_ft does it, or reconfigured, as torch 2.14 can.

    python -m benchmarks.recovery.groups      (with torch 2.14 or newer)

Workers on this host form a gloo group again and again, in turns in both ways:

    anew           another group, over another folder of the rendezvous store
    with one device   so, but all groups have the gloo device of the first one
    reconfigured   the same group, with the handles of all members, exchanged through the store

A time ends with the first all-reduce, on the slowest worker. Then the ends: a member waits for a message, or
in an all-reduce, that a live peer never takes part in. Does an abort end the wait, and how soon?
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.results import Summary, argument_parser, finish, table
from swift_ft.torch_adapters.connections import new_connections, shut_down, tcp_connections

WORLDS = (2, 4, 8)
TIMEOUT = timedelta(seconds=30)
ENDS_WITHIN_S = 5.0
_c10d: Any = dist.distributed_c10d


class Anew:
    """A group for each generation. An abort shuts its connections down."""

    name = "anew"
    shares = False

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._sockets: dict[int, str] = {}
        self._options: Any = None

    def begin(self, generation: int) -> Any:
        """The group of a generation."""
        before = tcp_connections()
        store = dist.PrefixStore(f"{self.name}/{generation}", self._store)
        group: Any = dist.ProcessGroupGloo(store, self._rank, self._size, self._options or TIMEOUT)
        if self.shares:
            self._options = group.options
        self._sockets = new_connections(before)
        return group

    def abort(self, _: Any) -> None:
        """From any thread."""
        shut_down(self._sockets)


class SharingDevice(Anew):
    """Each group has the device of the first one: a port, and a thread that looks at all sockets."""

    name = "anew, with one device"
    shares = True


class Reconfigured:
    """One group for all generations. An abort is torch's."""

    name = "reconfigured"

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        make: Any = dist.ProcessGroupGloo
        self._group = make(
            dist.PrefixStore("reconfigured", store), rank, size, TIMEOUT, enable_reconfigure=True
        )

    def begin(self, generation: int) -> Any:
        """The group of a generation."""
        keys = [f"handles/{generation}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], self._group.get_reconfigure_handle())
        options = _c10d.ReconfigureOptions()
        options.uuid = generation + 1
        options.handles = [handle.decode() for handle in self._store.multi_get(keys)]
        options.timeout = TIMEOUT
        self._group.reconfigure(options).wait()
        return self._group

    def abort(self, group: Any) -> None:
        """From any thread."""
        group.abort()


WAYS = (Anew, SharingDevice, Reconfigured)
WAITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a receive": lambda group, tensor: group.recv([tensor], 1, 0),
    "an all-reduce": lambda group, tensor: group.allreduce([tensor]),
}


def form(rank: int, size: int, port: int, repetitions: int, into: Any) -> None:
    """One worker of the measurement."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ways = [way(store, rank, size) for way in WAYS]
    for generation in range(repetitions + 1):  # the first one warms up
        for way in ways:
            store.set(f"ready/{way.name}/{generation}/{rank}", "")
            store.wait([f"ready/{way.name}/{generation}/{other}" for other in range(size)])
            begun = time.monotonic()
            way.begin(generation).allreduce([torch.ones(1)]).wait()
            if generation:
                into.put((way.name, generation, time.monotonic() - begun))


def wait(rank: int, port: int, number: int, kind: str, into: Any) -> None:
    """One of two workers: the first waits for the other one, which does nothing, and is told to stop."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    way = WAYS[number](store, rank, 2)
    group = way.begin(0)
    group.allreduce([torch.ones(1)]).wait()
    if rank == 0:
        work = WAITS[kind](group, torch.ones(4))
        threading.Timer(0.3, way.abort, [group]).start()
        begun = time.monotonic() + 0.3
        try:
            work.wait()
            into.put((time.monotonic() - begun, "returns, as if it had been received"))
        except RuntimeError as error:
            into.put((time.monotonic() - begun, f"raises {type(error).__name__}"))
    with contextlib.suppress(dist.DistStoreError):
        store.wait(["over"], timedelta(seconds=30 + ENDS_WITHIN_S))


def run(
    target: Callable[..., None], size: int, arguments: Callable[[int], tuple[Any, ...]]
) -> tuple[list[Any], Any, dist.TCPStore]:
    """Start workers.

    Args:
        target: what each of them does, given its rank, the arguments and a queue.
        size: how many there are.
        arguments: for the port of the store.

    Returns:
        the workers, the queue, the store.
    """
    context = multiprocessing.get_context("spawn")
    into: Any = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = arguments(store.port)
    workers = [context.Process(target=target, args=(rank, *given, into)) for rank in range(size)]
    for worker in workers:
        worker.start()
    return workers, into, store


def slowest(size: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each generation, by the way in which its group began."""
    workers, into, _store = run(form, size, lambda port: (size, port, repetitions))
    told = [into.get(timeout=300) for _ in range(size * len(WAYS) * repetitions)]
    for worker in workers:
        worker.join(30)
    return {
        way.name: [
            max(s for name, g, s in told if (name, g) == (way.name, generation))
            for generation in range(1, repetitions + 1)
        ]
        for way in WAYS
    }


def end_of_wait(number: int, kind: str) -> str:
    """How a wait ends after an abort, in words."""
    workers, into, store = run(wait, 2, lambda port: (port, number, kind))
    try:
        seconds, how = into.get(timeout=10 + ENDS_WITHIN_S)
        found = f"{how} after {1000 * seconds:.0f} ms"
    except Empty:
        found = f"**does not end** within {10 + ENDS_WITHIN_S:g} s"
    store.set("over", "")
    for worker in workers:
        worker.join(2)
        worker.kill()
    return found


def main() -> int:
    """Measures in turns and prints the report."""
    args = argument_parser(__doc__, repetitions=20).parse_args()
    if not hasattr(_c10d, "ReconfigureOptions"):
        print(
            f"groups.py: torch {torch.__version__} cannot reconfigure groups: use 2.14 or newer",
            file=sys.stderr,
        )
        return 2
    times = {size: slowest(size, args.repetitions) for size in WORLDS}
    ends = {kind: [end_of_wait(number, kind) for number in range(len(WAYS))] for kind in WAITS}
    names = [way.name for way in WAYS]
    rows = [
        [
            f"{size} workers",
            *(Summary.of([1000 * s for s in times[size][name]]).text(" ms", 2) for name in names),
        ]
        for size in WORLDS
    ]
    rows += [[f"an abort of {kind}", *ends[kind]] for kind in WAITS]
    body = (
        f"gloo; each time ends with the first all-reduce, on the slowest worker; medians (ranges) of "
        f"{args.repetitions} generations in turns.\n\n{table(['', *names], rows)}"
    )
    return finish("groups", body, {"times": times, "ends": ends}, args)


if __name__ == "__main__":
    sys.exit(main())
