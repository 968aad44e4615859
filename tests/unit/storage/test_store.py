from __future__ import annotations

import io
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from swift_ft.checkpoint.store_claim import tidy_store
from swift_ft.errors import StoreNotWritableError, UsageError
from swift_ft.observe import waits
from swift_ft.storage.hdfs import hdfs_class
from swift_ft.storage.retry import retry
from swift_ft.storage.store import Store
from swift_ft.testing import StoreConformanceTests
from tests.support.disks import mounted_disk


class TestFileStore(StoreConformanceTests):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store"


class TestMemoryStore(StoreConformanceTests):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{uuid.uuid4().hex}"


def test_training_does_not_import_pytest() -> None:
    program = "import swift_ft.testing, swift_ft.logging, sys; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_store_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritableError, match=r"cannot be written .*choose a directory"):
        Store(str(tmp_path / "file" / "store")).probe()


@pytest.mark.parametrize(("times", "passes"), [(1, True), (2, True), (3, False)])
def test_a_probe_whose_file_another_worker_tidies_away(
    times: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 may claim the store, and delete leftovers in it, while a slower worker looks at it first."""
    store, faster = Store(str(tmp_path / "store")), Store(str(tmp_path / "store"))
    read, left = store._fs.cat_file, [None] * times

    def read_late(path: str) -> bytes:
        if left:
            left.pop()
            tidy_store(faster)
        content: bytes = read(path)
        return content

    monkeypatch.setattr(store._fs, "cat_file", read_late)
    if passes:
        store.probe()
    else:
        with pytest.raises(StoreNotWritableError, match="No such file"):
            store.probe()
    assert not left
    assert store.list("") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted_disk(tmp_path, "1m") as disk:
        yield disk


def test_a_read_only_store_is_waited_for_once_it_has_been_used(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that may be mistyped is refused at once, in one line; a replacement waits."""
    store = Store(str(small_disk / "store"))
    store.write_json("run.json", {"run_id": "a"})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreNotWritableError, match=r"Read-only.*make its filesystem writable again"):
        store.probe()
    with pytest.raises(StoreNotWritableError, match=r"could not be for 0.1 s: make.*continue with --resume"):
        store.probe(0.1)
    waits = threading.Thread(target=store.probe, args=(60.0,))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    assert "is tried again for 0.1 s: make its filesystem writable again" in caplog.text
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    waits.join(60)
    assert not waits.is_alive()


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


@pytest.mark.parametrize("url", ["/", "file:///", "memory://", "~"])
def test_a_whole_filesystem_is_not_emptied(url: str) -> None:
    with pytest.raises(UsageError, match="directory of its own"):
        Store(url).delete_all()


def test_a_failed_write_to_hdfs_is_raised_again_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch deletes such a file before it closes it: only the first error says whether a retry helps."""
    native = pytest.importorskip("hdfs_native.fsspec").HdfsFileSystem
    failures = [FileNotFoundError("deleted in between"), OSError("no DataNode answers")]

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


def test_a_store_that_fails_for_long_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.01)
    caplog.set_level("INFO", "swift_ft.observe.waits")

    def attempt() -> str:
        if not caplog.records:
            raise ConnectionError("down")
        return "back"

    assert retry(attempt, 60.0, longest_wait_s=0.1, what="the store s3://bucket to work again") == "back"
    assert caplog.messages[0].startswith(
        "waits for the store s3://bucket to work again: 0 s so far, at most 60 s"
    )
    assert caplog.messages[-1].startswith("the wait for the store s3://bucket to work again is over")
