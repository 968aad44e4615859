from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from swift_ft.errors import StoreNotWritableError, UsageError
from swift_ft.logging import Store
from swift_ft.logging.hdfs import hdfs_class
from swift_ft.testing import LogStoreTests


class TestFileStore(LogStoreTests):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store"


class TestMemoryStore(LogStoreTests):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{uuid.uuid4().hex}"


def test_pytest_is_needed_by_nobody_who_only_trains() -> None:
    program = "import swift_ft.testing, swift_ft.logging, sys; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_store_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritableError, match=r"cannot be written .*choose a directory"):
        Store(str(tmp_path / "file" / "store")).probe()


def test_an_unknown_scheme_says_so() -> None:
    with pytest.raises(StoreNotWritableError, match=r"nosuch.*choose a plain path"):
        Store("nosuch://a/b").probe()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.Fs", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "missing", entry)
    with pytest.raises(StoreNotWritableError, match=r"no_such_package.*install that package"):
        Store("missing://a/b").probe()


def test_credentials_are_used_but_not_shown() -> None:
    store = Store("memory://user:se@cret@host/run")
    assert store.url == "memory://host/run"
    assert "cret" not in repr(store)
    assert store.child_url("a/b") == "memory://user:se@cret@host/run/a/b"


def test_a_plain_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs/a")
    monkeypatch.chdir("/")
    assert store.url == f"file://{tmp_path}/runs/a"
    store.write_json("x.json", {})
    assert (tmp_path / "runs/a/x.json").exists()


def test_create_json_without_hard_links(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert local.create_json("claim.json", {"by": 1})
    assert not local.create_json("claim.json", {"by": 2})
    assert local.list("") == ["claim.json"]


@pytest.mark.parametrize("url", ["/", "file:///", "memory://", "~"])
def test_a_whole_filesystem_is_not_emptied(url: str) -> None:
    with pytest.raises(UsageError, match="directory of its own"):
        Store(url).delete_all()


def test_a_failed_write_to_hdfs_is_told_again_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch deletes such a file before it closes it: only the first failure says whether waiting helps."""
    native = pytest.importorskip("hdfs_native.fsspec").HdfsFileSystem
    failures = [FileNotFoundError("deleted meanwhile"), OSError("no DataNode answers")]

    class File(io.RawIOBase):
        def write(self, data: object) -> int:
            raise failures.pop()

    monkeypatch.setattr(native, "__init__", lambda self, *args, **options: None)
    monkeypatch.setattr(native, "_open", lambda self, *args, **options: File())
    hdfs = hdfs_class()
    assert hdfs is not None
    file = hdfs()._open("/file", "wb")
    file.write(b"something")
    for ask in (file.flush, file.close):
        with pytest.raises(OSError, match="no DataNode answers"):
            ask()
    assert len(failures) == 1
