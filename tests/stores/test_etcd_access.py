"""etcd keeps strangers out: users with passwords, and TLS; mistakes are told in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.etcd import EtcdCluster, TlsFiles, binary
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError, UsageError

PASSWORD = "correct horse"


def etcdctl(cluster: EtcdCluster, *arguments: str) -> None:
    command = [str(binary("etcdctl")), "--endpoints", cluster.endpoints, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member that asks for a user."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("guarded"), 1)
    try:
        cluster.start()
        etcdctl(cluster, "user", "add", f"root:{PASSWORD}")
        etcdctl(cluster, "user", "grant-role", "root", "root")
        etcdctl(cluster, "user", "add", "anna:hers")
        etcdctl(cluster, "role", "add", "jobs")
        etcdctl(cluster, "role", "grant-permission", "jobs", "--prefix=true", "readwrite", "swift/")
        etcdctl(cluster, "user", "grant-role", "anna", "jobs")
        etcdctl(cluster, "auth", "enable")
        yield cluster
    finally:
        cluster.stop()


def as_user(cluster: EtcdCluster, folder: Path, text: str) -> StoreAddress:
    file = folder / "credentials"
    file.write_text(f"{text}\n")
    return StoreAddress.etcd(cluster.endpoints).with_files({"credentials": str(file)})


def test_a_user_with_a_password_is_let_in(tmp_path: Path, guarded: EtcdCluster) -> None:
    """Who may write under ``swift/`` needs no other right. A token that is gone is renewed."""
    store = connect(as_user(guarded, tmp_path, "anna:hers"), "run")
    store.set("key", "value")
    guarded.kill(0)  # and with it all tokens
    guarded.start(0)
    assert store.get("key") == b"value"
    store.set("key", "another")
    assert store.get("key") == b"another"


def test_the_password_may_be_in_the_environment(
    guarded: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_FT_STORE_CREDENTIALS", f"root:{PASSWORD}")
    store = connect(StoreAddress.etcd(guarded.endpoints), "run")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_strangers_are_refused(tmp_path: Path, guarded: EtcdCluster) -> None:
    with pytest.raises(UsageError, match=r"wants a user: .*--rdzv-conf credentials=FILE") as caught:
        connect(StoreAddress.etcd(guarded.endpoints), "run", timeout_s=5.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"refuses user 'anna': .*authentication failed") as caught:
        connect(as_user(guarded, tmp_path, "anna:wrong"), "run", timeout_s=5.0)
    assert "wrong" not in str(caught.value)
    with pytest.raises(UsageError, match="must be user:password"):
        connect(as_user(guarded, tmp_path, "anna"), "run", timeout_s=5.0)


def test_a_launcher_says_so_in_one_line(tmp_path: Path, guarded: EtcdCluster) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    as_user(guarded, tmp_path, "anna:wrong")
    launcher = [sys.executable, "-m", "swift_ft.cli.run", "--standalone", "--machines", "1"]
    launcher += ["--rdzv-backend", "etcd-v3", "--rdzv-endpoint", guarded.endpoints]
    launcher += ["--rdzv-conf", f"credentials={tmp_path / 'credentials'}", str(script)]
    ended = subprocess.run(launcher, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("swift-run: etcd at etcd-v3://127.0.0.1:")
    assert "refuses user 'anna'" in line


def test_where_nothing_answers_is_said(tmp_path: Path) -> None:
    with pytest.raises(RendezvousLostError, match=r"No etcd answers .*127.0.0.1:9 .*Connection refused"):
        connect(StoreAddress.etcd("127.0.0.1:9"), "run", timeout_s=0.5)
    with pytest.raises(UsageError, match=r"cannot be read: check --rdzv-conf ca=FILE"):
        connect(StoreAddress.etcd("127.0.0.1:9").with_files({"ca": str(tmp_path / "none")}), "run")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server and a client that it has signed, and a stranger that signed itself."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "stranger"):
        request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        openssl(*request, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        request = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
        openssl(*request, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr")
        signed = ["x509", "-req", "-in", f"{folder}/{name}.csr", "-days", "2", "-extfile", f"{folder}/names"]
        signed += ["-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key", "-CAcreateserial"]
        openssl(*signed, "-out", f"{folder}/{name}.pem")
    return folder


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def encrypted(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member that speaks TLS, and only with clients that have a certificate."""
    files = TlsFiles(*(certificates / name for name in ("ca.pem", "server.pem", "server.key")))
    cluster = EtcdCluster(tmp_path_factory.mktemp("encrypted"), 1, tls=files)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_certificates_let_in(certificates: Path, encrypted: EtcdCluster) -> None:
    files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
    address = StoreAddress.etcd(encrypted.endpoints)
    store = connect(
        address.with_files({name: str(certificates / file) for name, file in files.items()}), "run"
    )
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ca": "stranger.pem", "cert": "client.pem", "key": "client.key"}, "certificate verify failed"),
        ({"ca": "ca.pem"}, "etcd.* at etcd-v3://"),
        ({"ca": "ca.pem", "cert": "stranger.pem", "key": "stranger.key"}, "etcd.* at etcd-v3://"),
    ],
)
def test_other_certificates_are_refused(
    certificates: Path, encrypted: EtcdCluster, files: dict[str, str], words: str
) -> None:
    address = StoreAddress.etcd(encrypted.endpoints)
    own = address.with_files({name: str(certificates / file) for name, file in files.items()})
    with pytest.raises((UsageError, RendezvousLostError), match=words) as caught:
        connect(own, "run", timeout_s=1.0)
    assert "\n" not in str(caught.value)


def test_without_tls_it_is_refused(encrypted: EtcdCluster) -> None:
    with pytest.raises((UsageError, RendezvousLostError)) as caught:
        connect(StoreAddress.etcd(encrypted.endpoints), "run", timeout_s=1.0)
    assert "\n" not in str(caught.value)
