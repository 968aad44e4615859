"""Credentials that are missing, wrong, or for reading only: one line, exit code 2, nothing written."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import s3fs

from benchmarks.lib.seaweed import BUCKET, SECRET_KEY, SeaweedServer
from swift_ft.cli.recover.main import main
from tests.support.cluster import one_line, run_cluster, training
from tests.support.journals import checkpoint, opening, store_with

VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def url(own_seaweed: SeaweedServer) -> str:
    """A store that a run has left, with a leftover of a killed process."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    store_with(url, [*opening(3), *checkpoint(3, 0)], machines=3)
    own_seaweed.client().pipe_file(f"{url}/log/rank-00000/g00001.arrow.0123456789ab.tmp", b"half")
    return url


def without_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """None in variables, in files, or from a host's own service."""
    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()


def with_wrong_credentials(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET_KEY}-but-wrong")
    s3fs.S3FileSystem.clear_instance_cache()


def content(server: SeaweedServer, url: str) -> dict[str, bytes]:
    client = server.client()
    return {str(path): client.cat_file(path) for path in client.find(url)}


def commands(url: str, folder: Path) -> list[list[str]]:
    """Each verb that reads a store."""
    script = folder / "train.py"
    script.touch()
    out = str(folder / "out")
    return [
        ["status", url],
        ["verify", url],
        ["plan", url, "--fail", "1"],
        ["export", url, "--out", out],
        ["gc", url, "--dry-run"],
        ["gc", url, "--yes"],
    ]


@pytest.mark.parametrize("spoil", [without_credentials, with_wrong_credentials])
def test_swift_recover_without_permission(
    spoil: object,
    own_seaweed: SeaweedServer,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = content(own_seaweed, url)
    assert callable(spoil)
    spoil(monkeypatch, tmp_path)
    monkeypatch.setattr("swift_ft.offline.run_store._PATIENCE_S", 0.0)
    for command in commands(url, tmp_path):
        assert main(command) == 2, command
        told = capsys.readouterr()
        (line,) = told.err.splitlines()
        assert line.startswith(f"swift-recover: {url} cannot be read ("), command
        assert "credentials" in line
        assert SECRET_KEY not in told.out + told.err
    assert content(own_seaweed, url) == before
    assert not (tmp_path / "out").exists()


def test_credentials_for_reading_are_enough_to_look(
    own_seaweed: SeaweedServer,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_seaweed.restart(permitted=False)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr("swift_ft.offline.run_store._PATIENCE_S", 0.0)
    before = content(own_seaweed, url)
    *reading, deletes = commands(url, tmp_path)
    for command in reading:
        assert main(command) in (0, 1), capsys.readouterr().err  # 1: it names what the store lacks
    capsys.readouterr()
    assert main(deletes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"swift-recover: {url} cannot be written (")
    assert content(own_seaweed, url) == before


def test_swift_run_without_credentials(
    own_seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    without_credentials(monkeypatch, tmp_path)
    run = run_cluster(tmp_path, machines=2, script=[*training(tmp_path), "--store", url])
    assert run.code == 2, run.output[-3000:]
    line = one_line(run)
    assert f"{url} cannot be written" in line
    assert "redentials" in line
    assert content(own_seaweed, url) == {}
