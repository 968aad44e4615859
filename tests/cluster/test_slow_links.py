"""A link becomes slow: the worker that sends over it is named, whatever its processes compute."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import kill_processes_of, training
from tests.support.missing import skip_for_missing
from tests.support.network import Host, slow_down, speed_up, two_hosts
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "sends_much.py"
_DEADLINE_S = 90


def start(host: Host, folder: Path, rendezvous: str, slot: int) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "swift_ft.cli.run", "--nnodes", "2", "--rdzv-id", "slow"]
    launcher += ["--rdzv-endpoint", f"{rendezvous}:29445", "--local-addr", host.address]
    launcher += ["--node-rank", str(slot), "--log-dir", str(folder / "logs"), "--heartbeat-timeout", "10"]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.interface, "SWIFT_TEST_FOLDER": str(folder)}
    with (folder / f"{slot}.txt").open("w") as console:
        return subprocess.Popen(
            host.command(*launcher, *training(folder, SCRIPT, iterations=10**6)),
            stdout=console,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own},
            start_new_session=True,
        )


def test_a_slow_link_is_named_and_then_fast_again(tmp_path: Path) -> None:
    if shutil.which("tc") is None:
        skip_for_missing("the command tc of iproute2")
    named = "The link from worker 1 to {} is slow: "
    rate = re.compile(r"link of (\d), ([\d.]+) of the time, (\d+) bytes/s")

    def told() -> str:
        return "".join((tmp_path / f"{slot}.txt").read_text() for slot in range(2))

    def rate_of(worker: int) -> int:
        """Newest; 0 before the first second in which enough was sent."""
        return next((int(found[2]) for found in rate.findall(told())[::-1] if int(found[0]) == worker), 0)

    with two_hosts() as (first, second):
        machines = [start(host, tmp_path, first.address, slot) for slot, host in enumerate((first, second))]
        try:
            wait_until(lambda: min(rate_of(0), rate_of(1)) > 6e6, lambda: told()[-3000:], _DEADLINE_S)
            slow_down(second, "40mbit")  # 5 MB/s
            wait_until(lambda: named.format(first.address) in told(), lambda: told()[-3000:], _DEADLINE_S)
            wait_until(lambda: 4e6 < rate_of(1) < 6e6 < rate_of(0), lambda: told()[-3000:], _DEADLINE_S)
            speed_up(second)
            again = f"The link from worker 1 to {first.address} is as fast as others again"
            wait_until(lambda: again in told(), lambda: told()[-3000:], _DEADLINE_S)
            machines[0].send_signal(signal.SIGINT)
            for machine in machines:
                machine.wait(_DEADLINE_S)
        finally:
            kill_processes_of(tmp_path)  # the rendezvous store, too, which outlives a launcher that is killed
            for machine in machines:
                machine.wait(_DEADLINE_S)
    assert "The link from worker 0" not in told()  # the other way it is fast
    # It computes as fast as ever. The other one may not, where this machine has much else to do.
    assert "worker 1 takes" not in told()
