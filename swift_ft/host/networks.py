"""A network of its own for each machine of a standalone run, so that it can be cut, slowed down and mended.

Each machine is in a network namespace, on one end of a virtual cable. The other ends are in a bridge of this
host, where the launcher and its rendezvous store are. What is cut vanishes on its way, as in a switch that
has failed: whoever sends it uses a hardware address that nobody has. No packet says so.

Needs Linux, iproute2, nsenter and root. Another user becomes root of a user namespace, where the system
allows that, with networks that nobody outside of it sees.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_ft.host.outside import start_outside

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_VARIABLE = "SWIFT_NETWORK"
_IN_A_MACHINE = "eth0"
_PLACES = range(1, 200)
_NOBODY = "02:53:57:ff:ff:ff"
_FLAP_S = 1.0
_FAILED = re.compile(r"Command failed -:(\d+)")
"""The last line that ``ip -batch -`` prints: the number of the command that failed."""
_HOST = -1
"""The index of this host itself."""
_OWN_ROOT = ("unshare", "--user", "--map-root-user", "--net", "--mount")
_OWN_HOST = """
mount -t tmpfs tmpfs /run/netns 2>/dev/null || mount -t tmpfs tmpfs /run || exit
ip link set lo up && exec "$@"
"""
"""Names of namespaces are files in /run/netns, which an ordinary user may not make, nor the folder."""


def lacking() -> str:
    """Whatever this host lacks for it, in words; empty if it has all."""
    if not hasattr(ctypes.CDLL(None), "setns"):
        return "Linux"
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            return f"the command {command} of {package}"
    return "" if os.geteuid() == 0 or _may_be_own_root() else "root, or user namespaces"


@functools.cache
def _may_be_own_root() -> bool:
    """Whether this user may be root in a namespace. The system, or a container, may forbid it."""
    if shutil.which(_OWN_ROOT[0]) is None:
        return False
    command = [*_OWN_ROOT, "sh", "-c", _OWN_HOST, "sh", "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0


def become_root_for(arguments: Sequence[str]) -> None:
    """Let this process become another Python, as root of a user namespace; nothing if this is root already.

    That has a network of its own, in which there is this host and nothing else. What it writes belongs to the
    user who has called it.

    Args:
        arguments: for Python.
    """
    if os.geteuid() != 0:
        command = [*_OWN_ROOT, "sh", "-c", _OWN_HOST, "sh", sys.executable, *arguments]
        os.execvp(command[0], command)


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a run. This is their description: any process of it can cut and mend.

    Attributes:
        place: which of this host's.
        owner: the process of the launcher.
        count: number of machines.
    """

    place: int
    owner: int
    count: int

    @classmethod
    def made(cls, count: int) -> Networks:
        """Make networks for so many machines. Those of launchers that were killed go first.

        Raises:
            OSError: this host does not allow it.
        """
        _sweep()
        for place in _PLACES:
            networks = cls(place, os.getpid(), count)
            if _ip("link", "add", networks.bridge, "type", "bridge").returncode == 0:
                try:
                    networks._make()
                except BaseException:
                    networks.remove()
                    raise
                return networks
        raise OSError(_ip("link", "add", f"swb{_PLACES[0]}", "type", "bridge").stderr.strip())

    @classmethod
    def of_this_process(cls) -> tuple[Networks, int] | None:
        """The networks that this machine is in, and its index among them; None without any."""
        if (text := os.environ.get(_VARIABLE)) is None:
            return None
        place, owner, count, index = map(int, text.split())
        return cls(place, owner, count), index

    @property
    def bridge(self) -> str:
        """The name of this host's interface."""
        return f"swb{self.place}"

    def address(self, index: int = _HOST) -> str:
        """The address of a machine; by default that of this host."""
        return f"10.83.{self.place}.{index + 2}"

    def index_of(self, address: str) -> int:
        """The machine that has an address."""
        return int(address.rpartition(".")[2]) - 2

    def enter(self, index: int) -> None:
        """Let this process, and all that it starts, be on a machine. It must have a single thread.

        Raises:
            OSError: it may not.
        """
        namespace = os.open(_NAMESPACES / self._name(index), os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)
        os.environ[_VARIABLE] = f"{self.place} {self.owner} {self.count} {index}"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _IN_A_MACHINE

    def remove(self) -> None:
        """Delete them, as far as they are there."""
        lines = []
        for index in range(self.count):
            # A cable outlives a namespace that a process is still in.
            lines += [f"netns delete {self._name(index)}", f"link delete {self._cable(index)}"]
        _batch([*lines, f"link delete {self.bridge}"], "-force")

    def cut(self, index: int, seconds: float, *, sends: bool, hears: bool, peer: int | None = None) -> None:
        """Cut a machine off, and mend that after some time.

        Args:
            index: the machine.
            seconds: until it is mended.
            sends: what it sends is lost.
            hears: what is sent to it is lost.
            peer: from and to one machine only; None for all others, and this host.
        """
        pairs = self._pairs(index, sends=sends, hears=hears, peer=peer)
        _then(self._lines(pairs, lost=True), seconds, self._lines(pairs, lost=False))

    def flap(self, index: int, seconds: float) -> None:
        """Cut a machine off and mend that again and again, a second each."""
        pairs = self._pairs(index, sends=True, hears=True)
        cut, mended = self._lines(pairs, lost=True), self._lines(pairs, lost=False)
        pause = f"sleep {_FLAP_S:g}"
        rounds = max(1, round(seconds / (2 * _FLAP_S)))
        _then(cut, _FLAP_S, [*mended, *[pause, *cut, pause, *mended] * (rounds - 1)])

    def throttle(self, index: int, seconds: float, mbit: float) -> None:
        """Let a machine send so many megabits a second at most, for some time."""
        on = f"ip netns exec {self._name(index)} tc qdisc {{}} dev {_IN_A_MACHINE} root"
        shape = f"tbf rate {mbit:g}mbit burst 64kb latency 400ms"
        _then([f"{on.format('replace')} {shape}"], seconds, [on.format("delete")])

    def _pairs(
        self, index: int, *, sends: bool, hears: bool, peer: int | None = None
    ) -> list[tuple[int, int]]:
        """Pairs of a sender and a receiver that do not reach each other."""
        everybody = [one for one in (_HOST, *range(self.count)) if one != index]
        others = everybody if peer is None else [peer]
        return [(index, one) for one in others if sends] + [(one, index) for one in others if hears]

    def _lines(self, pairs: Iterable[tuple[int, int]], *, lost: bool) -> list[str]:
        """Commands after which those do not, or do again."""
        return [
            self._neighbour(sender, receiver, _NOBODY if lost else self._hardware(receiver))
            for sender, receiver in pairs
        ]

    def _neighbour(self, sender: int, receiver: int, hardware: str) -> str:
        # Whoever cuts is on a machine. The launcher is not.
        of_the_host = f"nsenter --net=/proc/{self.owner}/ns/net ip"
        where = of_the_host if sender == _HOST else f"ip -n {self._name(sender)}"
        return f"{where} {self._entry(sender, receiver, hardware)}"

    def _entry(self, sender: int, receiver: int, hardware: str) -> str:
        """The command of ``ip``, where the sender is, after which it sends to that hardware."""
        device = self.bridge if sender == _HOST else _IN_A_MACHINE
        return f"neigh replace {self.address(receiver)} lladdr {hardware} dev {device} nud permanent"

    def _entries(self, sender: int) -> list[str]:
        """Those with which it reaches all others."""
        others = [one for one in (_HOST, *range(self.count)) if one != sender]
        return [self._entry(sender, other, self._hardware(other)) for other in others]

    def _name(self, index: int) -> str:
        return f"swift-{self.owner}-{self.place}-{index}"

    def _cable(self, index: int) -> str:
        return f"sw{self.place}v{index}"

    def _hardware(self, index: int) -> str:
        return f"02:53:57:{self.place:02x}:00:{index + 1:02x}"

    def _make(self) -> None:
        """By one process for this host, and one for each machine: a hundred would take a second."""
        lines = [
            f"link set {self.bridge} address {self._hardware(_HOST)}",
            f"addr add {self.address()}/24 dev {self.bridge}",
            f"link set {self.bridge} up",
        ]
        for index in range(self.count):
            name, cable = self._name(index), self._cable(index)
            lines += [
                f"netns add {name}",
                f"link add {cable} type veth peer name {_IN_A_MACHINE} netns {name}",
                f"link set {cable} master {self.bridge} up",
            ]
        _batch([*lines, *self._entries(_HOST)])
        for index in range(self.count):
            lines = [
                f"link set {_IN_A_MACHINE} address {self._hardware(index)}",
                f"addr add {self.address(index)}/24 dev {_IN_A_MACHINE}",
                "link set lo up",
                f"link set {_IN_A_MACHINE} up",
            ]
            _batch([*lines, *self._entries(index)], "-n", self._name(index))


def _sweep() -> None:
    """Remove the networks of launchers that live no more."""
    found: dict[tuple[int, int], int] = {}
    for path in _NAMESPACES.glob("swift-*-*-*"):
        owner, place, index = map(int, path.name.split("-")[1:])
        found[owner, place] = max(found.get((owner, place), 0), index + 1)
    for (owner, place), count in found.items():
        if not Path(f"/proc/{owner}").exists():
            Networks(place, owner, count).remove()


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=30)


def _batch(lines: Sequence[str], *options: str) -> None:
    """Give commands to one ``ip``, which ends at the first one that fails.

    Args:
        lines: the commands.
        options: of ``ip``. With ``-force`` those that fail are skipped.

    Raises:
        OSError: one has failed.
    """
    done = subprocess.run(
        ["ip", *options, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode and "-force" not in options:
        *why, last = done.stderr.strip().splitlines() or [""]
        failed = _FAILED.fullmatch(last)
        command = ["ip", *options, *([lines[int(failed[1]) - 1]] if failed else [])]
        raise OSError(f"{' '.join(command)}: {'; '.join(why if failed else [*why, last])}")


def _run(lines: Sequence[str]) -> None:
    for line in lines:
        done = subprocess.run(shlex.split(line), check=False, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"{line}: {done.stderr.strip()}")


def _then(lines: Sequence[str], seconds: float, later: Sequence[str]) -> None:
    """Do something now, and something later, by a process that belongs to no machine and to no run."""
    _run(lines)
    code = "\n".join([f"sleep {seconds:g}", *later])
    start_outside(["sh", "-c"], code, env={"PATH": os.environ.get("PATH", os.defpath)})
