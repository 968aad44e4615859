"""Measures what one step of the control plane takes, with nothing else going on: for `model.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from benchmarks.recovery.protocol import pipeline
from benchmarks.scale.host import Host
from benchmarks.scale.machine import Job, status_of
from benchmarks.scale.model import Costs
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect as connect_to_store
from swift_ft.launch.rendezvous.store_service import StoreService
from swift_ft.network import Channel, JobSecret, Port, connect
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer, Stamped, block_from_text, block_to_text
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step

_MACHINES = 1024
_GROUP = 32
_HOST = "127.0.0.1"
_FEW, _BLOCKS, _PAUSE_S = 64, 10, 1.0


def calibrated() -> Costs:
    """All costs that can be measured without a job; those of processes that start are left at nothing."""
    wake_s = _wake()  # first: it forks, while this process has a single thread
    store_s, trip_s, client_s = _store()
    hop_s, send_s, receive_s, per_byte_s = _hop()
    decode_s, encode_s, event_bytes, block_bytes = _codec()
    apply_s, plan_s = _protocol()
    return Costs(
        store_op_s=store_s,
        round_trip_s=trip_s,
        store_op_cpu_s=client_s,
        hop_s=hop_s,
        send_s=send_s,
        receive_s=receive_s,
        per_byte_s=per_byte_s,
        decode_s=decode_s,
        encode_s=encode_s,
        apply_s=apply_s,
        plan_s=plan_s,
        wake_s=max(0.0, wake_s - send_s - receive_s),
        event_bytes=event_bytes,
        block_bytes=block_bytes,
    )


def _best(what: Callable[[], float], times: int = 5) -> float:
    """The least of several measurements: others can only make one longer."""
    return min(what() for _ in range(times))


def _cpu_of(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


def _store(calls: int = 1000) -> tuple[float, float, float]:
    """The store's own time for an operation, the way to it and back, and the client's time."""
    service = StoreService(_HOST, 0)
    try:
        store = connect_to_store(service.address, "calibration")
        walls, servers, clients = [], [], []
        for attempt in range(5):
            before, own, began = _cpu_of(service.pid), time.process_time(), time.perf_counter()
            for number in range(calls):
                store.compare_set(f"key/{attempt}/{number}", "", "x" * 100)
            walls.append((time.perf_counter() - began) / calls)
            servers.append((_cpu_of(service.pid) - before) / calls)
            clients.append((time.process_time() - own) / calls)
        server, client = min(servers), min(clients)
        return server, max(0.0, min(walls) - server - client), client
    finally:
        service.close()


@contextmanager
def _echo() -> Iterator[Channel]:
    """A channel whose other side, a thread, answers each message that asks for it."""

    def serve(channel: Channel) -> None:
        while (message := channel.receive(60.0)) is not None:
            if "echo" in message:
                channel.send({"ok": 1})

    secret = JobSecret.generated()
    port = Port(_HOST, secret, {"calibration": serve})
    channel = connect(port.address, secret, "calibration", timeout_s=10.0)
    try:
        yield channel
    finally:
        channel.close()
        port.close()


def _hop(messages: int = 500) -> tuple[float, float, float, float]:
    """Wall of a message, the time to send and to receive a small one, and for each byte more."""
    with _echo() as channel:

        def round_trip() -> float:
            began = time.perf_counter()
            for _ in range(messages):
                channel.send({"echo": 1})
                channel.receive(10.0)
            return (time.perf_counter() - began) / messages

        def both(text: str) -> float:
            began = time.process_time()
            for _ in range(messages):
                channel.send({"echo": 1, "text": text})
                channel.receive(10.0)
            return (time.process_time() - began) / messages

        def sending(text: str) -> float:
            began = time.thread_time()
            for _ in range(messages):
                channel.send({"text": text})
            channel.send({"echo": 1})
            took = time.thread_time() - began
            channel.receive(10.0)
            return took / messages

        wall, cpu, send = _best(round_trip), _best(lambda: both("")), _best(lambda: sending(""))
        large = 10_000
        per_byte_s = max(0.0, _best(lambda: sending("x" * large)) - send) / large
        receive = max(0.0, cpu / 2 - send)
        return max(0.0, wall / 2 - send - receive), send, receive, per_byte_s


def _block(count: int) -> list[Stamped]:
    return [
        Stamped(status_of(rank, 2, fresh=False), time.time(), f"worker {rank}", f"origin-{rank:06}", 3)
        for rank in range(count)
    ]


def _codec(times: int = 50) -> tuple[float, float, float, float]:
    """To decode and to encode one event of a group's block; bytes of an event, and of the block itself."""
    block = _block(_GROUP)
    text = block_to_text(block)

    def decode() -> float:
        began = time.process_time()
        for _ in range(times):
            Sequencer().admit_all(block_from_text(text))
        return (time.process_time() - began) / times / _GROUP

    def encode() -> float:
        began = time.process_time()
        for _ in range(times):
            block_to_text(block)
        return (time.process_time() - began) / times / _GROUP

    longer = len(block_to_text(_block(2 * _GROUP)))
    each = (longer - len(text)) / _GROUP
    return _best(decode), _best(encode), each, len(text) - each * _GROUP


def _protocol() -> tuple[float, float]:
    """To apply one report, and to make the plan, for each worker."""

    def once() -> tuple[float, float]:
        state = _asked()
        reports = [replace(pipeline(rank, state.generation)) for rank in range(_MACHINES)]
        began = time.process_time()
        for report in reports[:-1]:
            state = step(state, report)
        applied = time.process_time()
        step(state, reports[-1])
        planned = time.process_time()
        return (applied - began) / (_MACHINES - 1), (planned - applied) / _MACHINES

    found = [once() for _ in range(5)]
    return min(apply for apply, _ in found), min(plan for _, plan in found)


def _asked() -> State:
    """A job whose workers are asked to report."""
    state = step(State(), ev.JobOpened(machines=_MACHINES, checkpoint=400))
    for number in range(_MACHINES):
        state = step(state, ev.MachineJoined(machine=f"m-{number}.0", address=f"host-{number}:1"))
    return state


def _wake() -> float:
    """What a small block costs one participant in a job, beside its way there: what wakes, and looks.

    A loop over one wait finds a fifth of that: here a participant has several threads, none of which is in a
    processor's caches, and which take turns with those of all others.
    """
    service = StoreService(_HOST, 0)
    job = Job(service.address, "calibration", _FEW, JobSecret.generated())
    gc.freeze()
    host = Host(job, range(_FEW), shares=True)
    try:
        host.begin()
        host.live(1, 300.0)
        journal = open_journal(partial(connect_to_store, job.store, job.run_id), by="calibration")

        def round_of(number: int) -> float:
            time.sleep(_PAUSE_S)
            idle, calm = host.costs().cpu_s, time.monotonic()
            time.sleep(_PAUSE_S)
            before, began = host.costs().cpu_s, time.monotonic()
            for block in range(_BLOCKS):
                journal.append(ev.FaultInjected(fault=f"{number}-{block}"))
                time.sleep(_PAUSE_S / _BLOCKS)
            used, took = host.costs().cpu_s - before, time.monotonic() - began
            return used - (before - idle) / (began - calm) * took

        return min(round_of(number) for number in range(3)) / _BLOCKS / _FEW / 2
    finally:
        host.close()
        service.close()
