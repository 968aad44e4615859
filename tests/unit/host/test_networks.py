"""The commands that make the networks of machines, given to a program that stands in for ``ip``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_ft.host.networks import Networks

IP = """#!/bin/sh
echo "ip $*" >> {told}
case "$*" in *-batch*) ;; *) exit 0;; esac
number=0
while read -r line; do
    number=$((number + 1))
    echo "$line" >> {told}
    case "$line" in {failing})
        printf '{words}' >&2
        echo "Command failed -:$number" >&2
        case "$*" in *-force*) ;; *) exit 1;; esac
    esac
done
"""


class StandIn:
    """A program that stands in for ``ip``.

    Args:
        folder: of the program, and of what it is told.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = folder / "told"
        self.fail()

    def fail(self, failing: str = "no-such-line", words: str = "") -> None:
        """From now on lines of that pattern fail, with these words."""
        program = self._folder / "ip"
        program.write_text(IP.format(told=self._told, failing=failing, words=words))
        program.chmod(0o755)

    def told(self) -> dict[str, list[str]]:
        """The lines that it was told since the last look, by its command line."""
        found: dict[str, list[str]] = {}
        for line in self._told.read_text().splitlines():
            if line.startswith("ip "):
                assert line not in found
                lines = found[line] = []
            else:
                lines.append(line)
        self._told.unlink()
        return found


@pytest.fixture
def ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("swift_ft.host.networks._NAMESPACES", tmp_path / "none")
    return StandIn(tmp_path)


def test_each_machine_takes_one_process(ip: StandIn) -> None:
    """And this host two, of which the first one finds a place."""
    made = Networks.made(3)
    told = ip.told()
    machines = [f"ip -n swift-{os.getpid()}-1-{index} -batch -" for index in range(3)]
    assert [*told] == ["ip link add swb1 type bridge", "ip -batch -", *machines]
    for command, lines in told.items():
        entries = [line.split()[2] for line in lines if line.startswith("neigh replace")]
        if command.endswith("-batch -"):
            own = made.address(machines.index(command)) if command in machines else made.address()
            assert sorted([*entries, own]) == [f"10.83.1.{number}" for number in (1, 2, 3, 4)]
            assert sum(line.startswith("addr add") for line in lines) == 1
    made.remove()
    ((command, lines),) = ip.told().items()
    assert command == "ip -force -batch -"
    assert sorted(lines) == sorted(
        [
            *(f"netns delete swift-{os.getpid()}-1-{index}" for index in range(3)),
            *(f"link delete sw1v{index}" for index in range(3)),
            "link delete swb1",
        ]
    )


@pytest.mark.parametrize(
    ("failing", "words", "said"),
    [
        (
            "netns*-1",
            'Cannot create namespace file "x": File exists\\n',
            'ip netns add swift-{pid}-1-1: Cannot create namespace file "x": File exists',
        ),
        (
            "link*lo*up",
            "RTNETLINK answers: Operation not permitted\\n",
            "ip -n swift-{pid}-1-0 link set lo up: RTNETLINK answers: Operation not permitted",
        ),
        (
            "addr*swb1",
            "Error: no.\\nSee the manual\\n",
            "ip addr add 10.83.1.1/24 dev swb1: Error: no.; See the manual",
        ),
    ],
)
def test_an_error_is_the_line_that_failed_and_why(failing: str, words: str, said: str, ip: StandIn) -> None:
    """Nothing is left then."""
    ip.fail(failing, words)
    with pytest.raises(OSError, match="ip ") as raised:
        Networks.made(3)
    assert str(raised.value) == said.format(pid=os.getpid())
    assert [*ip.told()][-1] == "ip -force -batch -"


def test_what_is_not_there_does_not_keep_the_rest(ip: StandIn) -> None:
    ip.fail("netns*", "Cannot remove namespace file\\n")
    Networks(7, os.getpid(), 2).remove()
    assert len(ip.told()["ip -force -batch -"]) == 5
