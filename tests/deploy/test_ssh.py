"""The ssh recipe against a real sshd: each host is an address of this host's loopback network."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.ports import free_port
from tests.deploy.processes import environment, leaves_nothing, module, start
from tests.deploy.recipes import DEPLOY
from tests.support.cluster import training
from tests.support.missing import skip_for_missing
from tests.support.waiting import wait_until

SCRIPT = DEPLOY / "ssh" / "swift-ssh.sh"
SSHD = Path("/usr/sbin/sshd")
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Two machines and a spare."""

FAKE = """#!/bin/sh
# An ssh that connects to nowhere: ssh HOST COMMAND runs the command here. It has a session of its own, as
# behind an sshd: a terminal's Ctrl-C does not arrive there. (A second one ends a launcher at once.)
shift
exec setsid --wait sh -c "$*"
"""


class Job:
    """The recipe's script as a terminal runs it."""

    def __init__(self, folder: Path, ssh: str) -> None:
        self._output = folder / "output.txt"
        (folder / "hosts").write_text(f"{HOSTS[0]}  # the rendezvous store\n\n{HOSTS[1]}\n{HOSTS[2]}\n")
        more = {
            "MACHINES": "2",
            "PORT": str(free_port()),
            "RUN": "ssh",
            "SSH": ssh,
            "SWIFT_RUN": module("swift_ft.cli.run", folder),
        }
        flags = ["--nproc-per-node", "1", "--heartbeat-timeout", "8", "--log-dir", str(folder / "logs")]
        command = [str(SCRIPT), str(folder / "hosts"), *flags, *training(folder, iterations=150)]
        self.process = start(command, self._output, environment(folder, **more))

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text."""
        wait_until(lambda: text in self.output(), text)

    def output(self) -> str:
        return self._output.read_text()


@pytest.fixture
def fake_ssh(tmp_path: Path) -> str:
    path = tmp_path / "ssh"
    path.write_text(FAKE)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """A command that reaches a server with keys that nobody else has."""
    if not SSHD.exists():
        skip_for_missing("sshd (apt-get install openssh-server)")
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(key, check=True, timeout=60)
    port = free_port()
    config = [f"ListenAddress {host}:{port}" for host in HOSTS]
    config += [
        f"HostKey {tmp_path}/host",
        f"AuthorizedKeysFile {tmp_path}/user.pub",
        f"PidFile {tmp_path}/pid",
    ]
    config += [
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "PermitRootLogin prohibit-password",
    ]
    (tmp_path / "sshd_config").write_text("\n".join(config) + "\n")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own folder, as its package would make it
    server = subprocess.Popen(
        [str(SSHD), "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.PIPE
    )
    options = [
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        f"UserKnownHostsFile={tmp_path}/known",
        "LogLevel=ERROR",
    ]
    try:
        yield " ".join(
            ["ssh", "-F", "none", "-i", f"{tmp_path}/user", "-p", str(port), *(f"-o{o}" for o in options)]
        )
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_a_host_that_is_lost_is_replaced(ssh: str, tmp_path: Path) -> None:
    """The end of its connection stops its launcher: it does not train on where nobody can stop it."""
    with leaves_nothing(tmp_path):
        job = Job(tmp_path, ssh)
        job.wait_for("iteration 5:")
        [client] = [pid for pid in children_of(job.process.pid) if "ssh 127.0.0.3" in line_of(pid)]
        os.kill(client, signal.SIGKILL)
        job.wait_for("is lost: stopped by SIGTERM")
        assert job.process.wait(200) == 0, job.output()[-3000:]
        ended = [line for line in job.output().splitlines() if " ended with exit code " in line]
        assert sorted(line.split()[-1] for line in ended) == ["0", "0", "137"]
        assert "[127.0.0.4] [machine 1] iteration 149:" in job.output()
        assert "1 recovery, " in job.output()


@pytest.mark.thorough
def test_ctrl_c_ends_the_run_on_all_hosts(fake_ssh: str, tmp_path: Path) -> None:
    with leaves_nothing(tmp_path):
        job = Job(tmp_path, fake_ssh)
        job.wait_for("iteration 5:")
        os.killpg(job.process.pid, signal.SIGINT)  # as the terminal does
        assert job.process.wait(60) == 130, job.output()[-3000:]
        ended = [line for line in job.output().splitlines() if " ended with exit code " in line]
        assert sorted(line.split()[1] for line in ended) == sorted(HOSTS)
        assert {line.split()[-1] for line in ended} == {"130"}


@pytest.mark.parametrize(
    ("hosts", "machines", "words"),
    [
        (None, "1", "HOSTS is a readable file"),
        ("# none\n", "1", "0 hosts for 1 machines"),
        ("a\nb\n", "0", "2 hosts for 0"),
    ],
)
def test_bad_input(hosts: str | None, machines: str, words: str, fake_ssh: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    if hosts is not None:
        path.write_text(hosts)
    done = subprocess.run(
        [str(SCRIPT), str(path), "train.py"],
        env=environment(tmp_path, MACHINES=machines, SSH=fake_ssh),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_a_second_word_on_a_line_names_the_failure_domain(fake_ssh: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\track 1\r\n  user@b # no domain\nc  rack2")
    done = subprocess.run(
        [str(SCRIPT), str(path), "train.py"],
        env=environment(tmp_path, SSH=fake_ssh, SWIFT_RUN="printf '%s\\n'"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line.partition("] ") for line in done.stdout.splitlines()]
    behind = {
        host: [word for begin, _, word in said if begin == f"[{host}"][10:] for host in ("a", "user@b", "c")
    }
    assert behind == {
        "a": ["--failure-domain", "rack 1", "train.py"],
        "user@b": ["train.py"],
        "c": ["--failure-domain", "rack2", "train.py"],
    }


def children_of(pid: int) -> list[int]:
    """All processes that descend from one."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [descendant for child in map(int, found) for descendant in (child, *children_of(child))]


def line_of(pid: int) -> str:
    """A process's command: its name, and the host for an ssh."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return " ".join([words[0], *(word for word in words if word in HOSTS)])
