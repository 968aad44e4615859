"""Two hosts of their own, as network namespaces of this one, and a cable between them that can be cut.

Nothing of what one sends then reaches the other one: no packet says that a connection has ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.missing import skip_for_missing


@dataclass(frozen=True, slots=True)
class Host:
    """One of the hosts.

    Attributes:
        namespace: the name of its network namespace.
        interface: its end of the cable.
        address: its address.
    """

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two connected hosts, within the block. Skips the test where this user may not make them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        skip_for_missing("network namespaces (the command ip of iproute2, and root)")
    name = uuid.uuid4().hex[:6]
    hosts = [Host(f"swift-{name}-{i}", f"sw{name}{i}", f"10.77.99.{i + 1}") for i in range(2)]
    try:
        for host in hosts:
            if _ip("netns", "add", host.namespace).returncode != 0:
                skip_for_missing("network namespaces (this container forbids them)")
        first, second = hosts
        made = _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        if made.returncode != 0:
            skip_for_missing(f"virtual Ethernet ({made.stderr.strip()})")
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace, check=True)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface, check=True)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up", check=True)
        yield first, second
    finally:
        for host in hosts:
            _ip("netns", "delete", host.namespace)


def cut(host: Host) -> None:
    """Cut the cable at this host."""
    _ip("-n", host.namespace, "link", "set", host.interface, "down", check=True)


@contextmanager
def swallowed(first: Host, second: Host) -> Iterator[None]:
    """Within the block what these two send to each other vanishes on its way, and neither of them notices.

    They have wrong hardware addresses of each other. A cable that is cut at one of them is known to its
    kernel at once, and so is its return.
    """
    pairs = ((first, second), (second, first))
    for host, other in pairs:
        entry = [other.address, "lladdr", "02:00:00:00:00:99", "dev", host.interface, "nud", "permanent"]
        _ip("-n", host.namespace, "neigh", "replace", *entry, check=True)
    yield
    for host, other in pairs:
        _ip("-n", host.namespace, "neigh", "delete", other.address, "dev", host.interface, check=True)


def slow_down(host: Host, rate: str) -> None:
    """From now on this host sends so much over the cable at most: ``50mbit``, say."""
    shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
    command = host.command("tc", "qdisc", "replace", "dev", host.interface, "root", *shape)
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def speed_up(host: Host) -> None:
    """It is as fast as before again."""
    command = host.command("tc", "qdisc", "delete", "dev", host.interface, "root")
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _ip(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=30)
