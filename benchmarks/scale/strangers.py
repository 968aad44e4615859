"""What strangers at the ports of a run cost its training: step times in attacked phases over those between.

A real run of four machines on this host. While it trains, phases of a few seconds take turns: in every other
one, connections with random bytes and half-open ones go to each port of the run, as quickly as one thread
opens them. Printed is the ratio of the median times between two iterations, and how many connections it took.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.results import argument_parser, finish, table
from examples.commands import descendants

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_swift.py"
SMALL = ["--layers=8", "--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--microbatches=8"]
HELD = 32
_LISTENING = "0A"
_ITERATION = re.compile(r"iteration (\d+):")


def main() -> int:
    """Run, attack, and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--phase-s", type=float, default=3.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, training(Path(folder), args.iterations) as run:
        attack = Attack(run.pid, args.phase_s)
        quiet, attacked = step_times(run, attack)
        attack.stop.set()
        code = run.wait(60)
    result = Result(quiet, attacked, attack.connections, code)
    return finish("strangers", result.report(), result.facts(), args)


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured.

    Attributes:
        quiet: times between two iterations, in seconds, while no stranger connects.
        attacked: the same while they do.
        connections: of strangers, in all.
        code: exit code of the run.
    """

    quiet: list[float]
    attacked: list[float]
    connections: int
    code: int

    def facts(self) -> dict[str, Any]:
        """All results, for ``--json``."""
        quiet, attacked = statistics.median(self.quiet), statistics.median(self.attacked)
        return {
            "ratio": attacked / quiet,
            "quiet_ms": 1e3 * quiet,
            "attacked_ms": 1e3 * attacked,
            "steps": [len(self.quiet), len(self.attacked)],
            "connections": self.connections,
            "exit_code": self.code,
        }

    def report(self) -> str:
        """All results as Markdown."""
        found = self.facts()
        rows = [
            ["without them", f"{found['quiet_ms']:.1f} ms", str(len(self.quiet))],
            ["beside them", f"{found['attacked_ms']:.1f} ms", str(len(self.attacked))],
            ["with / without", f"{found['ratio']:.3f}", ""],
        ]
        return (
            "A run of four machines. In every other phase one thread opens connections to all its ports, as "
            "fast as it can, with random bytes or half-open. A step is the time between two iterations.\n\n"
            f"{table(['', 'median step', 'steps'], rows)}\n\n"
            f"{self.connections:,} connections in all. The run ended with exit code {self.code}."
        )


@contextlib.contextmanager
def training(folder: Path, iterations: int) -> Iterator[subprocess.Popen[str]]:
    """A run whose output can be read, ended at the latest with the block."""
    command = [sys.executable, "-m", "swift_ft.cli.run", "--standalone", "--machines", "4"]
    command += ["--log-dir", str(folder / "logs"), str(EXAMPLE), *SMALL, f"--iterations={iterations}"]
    command += ["--checkpoint-every=1000", "--store", str(folder / "store")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        yield run
    finally:
        run.terminate()
        run.wait(60)


def step_times(run: subprocess.Popen[str], attack: Attack) -> tuple[list[float], list[float]]:
    """Seconds between two iterations: in quiet phases, and in attacked ones."""
    found: tuple[list[float], list[float]] = ([], [])
    before: tuple[float, int] | None = None
    assert run.stdout is not None
    for line in run.stdout:
        if not _ITERATION.search(line):
            continue
        now, phase = time.perf_counter(), attack.phase
        if before is not None and before[1] == phase:  # not across two phases
            found[phase % 2].append(now - before[0])
        before = now, phase
    return found


class Attack:
    """A thread that attacks in every other phase.

    Args:
        pid: of the launcher.
        phase_s: length of a phase.

    Attributes:
        phase: number of the present one; odd ones are attacked.
        connections: how many were opened.
        stop: ends it.
    """

    def __init__(self, pid: int, phase_s: float) -> None:
        self.phase = 0
        self.connections = 0
        self.stop = threading.Event()
        self._pid = pid
        self._phase_s = phase_s
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.stop.wait(self._phase_s):
            ports = listening_ports(self._pid)
            self.phase += 1
            self._attack(ports, time.monotonic() + self._phase_s)
            self.phase += 1

    def _attack(self, ports: list[int], until: float) -> None:
        with contextlib.ExitStack() as held:
            for number, port in enumerate(itertools.cycle(ports)):
                if time.monotonic() > until or self.stop.is_set():
                    return
                with contextlib.suppress(OSError):
                    line = socket.create_connection(("127.0.0.1", port), 1.0)
                    self.connections += 1
                    if number < HELD:
                        held.enter_context(line)
                        continue
                    with line:
                        line.sendall(os.urandom(300))


def listening_ports(pid: int) -> list[int]:
    """The ports at which a process and its descendants listen."""
    inodes = {str(entry) for one in (pid, *descendants(pid)) for entry in descriptors(one)}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        facts = line.split()
        if facts[3] == _LISTENING and f"socket:[{facts[9]}]" in inodes:
            found.append(int(facts[1].rpartition(":")[2], 16))
    return found


def descriptors(pid: int) -> Iterator[Path]:
    """What the descriptors of a process stand for."""
    with contextlib.suppress(OSError):  # it has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield entry.readlink()


if __name__ == "__main__":
    sys.exit(main())
