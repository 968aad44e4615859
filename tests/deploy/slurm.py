"""A Slurm cluster of this host: a real controller, and four nodes that are daemons of it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.lib.ports import free_port
from tests.support.missing import skip_for_missing
from tests.support.waiting import wait_until

NODES = 4
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")


class Slurm:
    """Skips the test where Slurm is missing, or this user is not root, as its daemons must be.

    Args:
        folder: for all that the daemons write.

    Attributes:
        env: variables with which Slurm's commands find this cluster.
    """

    def __init__(self, folder: Path) -> None:
        search = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
        missing = [name for name in COMMANDS if shutil.which(name, path=search) is None]
        if missing:
            skip_for_missing(f"Slurm ({', '.join(missing)}; apt-get install slurm-wlm munge)")
        if os.getuid() != 0:
            skip_for_missing("root, as whom slurmd has to run")
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": search}
        for name in ("state", "munge", "jobs"):
            (folder / name).mkdir()
        self._pids = [folder / "munge" / "pid", folder / "slurmctld.pid"]
        self._pids += [folder / f"n{number}.pid" for number in range(1, NODES + 1)]
        (folder / "slurm.conf").write_text(self._configuration())
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _configuration(self) -> str:
        host, folder = socket.gethostname(), self.folder
        ports = [str(free_port()) for _ in range(NODES + 1)]
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": host,
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge/socket",
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool-%n",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/%n.pid",
            "SlurmctldLogFile": f"{folder}/slurmctld.log",
            "SlurmdLogFile": f"{folder}/%n.log",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "MpiDefault": "none",
            "ReturnToService": "2",
            "JobRequeue": "1",
            "MailProg": "/bin/true",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for number, port in enumerate(ports[1:], start=1):
            lines.append(f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1")
        return "\n".join([*lines, f"PartitionName=all Nodes=n[1-{NODES}] Default=YES State=UP", ""])

    def _start(self) -> None:
        munge, key = self.folder / "munge", self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        owner = pwd.getpwnam("munge").pw_uid
        for path in (munge, key):
            os.chown(path, owner, -1)
        key.chmod(0o400)
        for path in [self.folder, *self.folder.parents]:  # the daemon's user has to reach its files
            with contextlib.suppress(PermissionError):
                path.chmod(path.stat().st_mode | 0o011)
        files = {"--key-file": key, "--pid-file": munge / "pid", "--log-file": munge / "log"}
        files |= {"--socket": munge / "socket", "--seed-file": munge / "seed"}
        command = ["munged", *(str(word) for pair in files.items() for word in pair)]
        self._run(["setpriv", f"--reuid={owner}", "--clear-groups", *command])
        self._run(["slurmctld", "-c"])
        for number in range(1, NODES + 1):
            self._run(["slurmd", "-N", f"n{number}"])
        wait_until(
            lambda: self._run(["sinfo", "-h", "-t", "idle", "-o", "%D"]).strip() == str(NODES), "the nodes"
        )

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job, and return its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *command],
            env={**self.env, **variables},
            cwd=self.folder / "jobs",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def signal(self, job: str, name: str) -> None:
        """Send a signal to the script of a job, as Slurm does before the time limit."""
        self._run(["scancel", "--batch", f"--signal={name}", job])

    def start_now(self, job: str) -> None:
        """A job that was queued again waits for two minutes."""
        self._run(["scontrol", "update", f"JobId={job}", "StartTime=now"])

    def state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by name."""
        words = self._run(["scontrol", "--oneliner", "show", "job", job]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def close(self) -> None:
        """Stop the daemons, the newest first."""
        for path in reversed(self._pids):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                os.kill(pid, signal.SIGTERM)
                for _ in range(100):
                    os.kill(pid, 0)
                    time.sleep(0.1)
