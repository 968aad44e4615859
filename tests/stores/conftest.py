"""Real servers. Each test process starts one of each kind when its first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from benchmarks.lib.etcd import EtcdCluster
from benchmarks.lib.hadoop import HdfsCluster, MissingError, classpath
from benchmarks.lib.seaweed import SeaweedServer
from tests.support.missing import skip_for_missing


@pytest.fixture(scope="session")
def seaweed_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An S3 server for all tests of this process."""
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def seaweed(seaweed_running: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    """The server, to which the usual environment variables point."""
    s3fs.S3FileSystem.clear_instance_cache()  # connections of earlier tests, with other variables
    for name, value in seaweed_running.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed_running


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[HdfsCluster]:
    """HDFS, where this machine has Java and the packages."""
    assert pytestconfig.cache is not None
    try:
        jars = classpath(pytestconfig.cache.mkdir("hadoop"))
    except MissingError as error:
        skip_for_missing(error)
    cluster = HdfsCluster(tmp_path_factory.mktemp("hdfs"), jars)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def etcd_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members of etcd for all tests of this process."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def etcd(etcd_running: EtcdCluster) -> Iterator[EtcdCluster]:
    """The members. A test may kill and freeze them: all of them run again afterwards."""
    yield etcd_running
    etcd_running.mend()


@pytest.fixture
def own_seaweed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    """A server that a test may kill."""
    server = SeaweedServer(tmp_path / "seaweed")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        server.start()
        yield server
    finally:
        server.kill()
        s3fs.S3FileSystem.clear_instance_cache()
