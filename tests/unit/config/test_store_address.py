"""Where a rendezvous store is, as text and in a worker's environment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from swift_ft.config.store_address import ETCD, StoreAddress
from swift_ft.errors import UsageError
from swift_ft.plain import from_plain

EMBEDDED = StoreAddress.tcp("host0", 29400)
CLUSTER = StoreAddress(
    ("a:2379", "b:2379"), ETCD, ca="/etc/my ca.pem", cert="/c", key="/k", credentials="/etc/user"
)


@pytest.mark.parametrize(
    "address", [EMBEDDED, StoreAddress.tcp("::1", 1), CLUSTER, StoreAddress(("a:1",), ETCD)]
)
def test_text_and_json_lose_nothing(address: StoreAddress) -> None:
    assert StoreAddress.parse(str(address)) == address
    assert " " not in str(address)  # --endpoint-out writes it before a space and the run's name
    assert from_plain(StoreAddress, json.loads(json.dumps(dataclasses.asdict(address)))) == address


def test_the_embedded_store_is_named_as_ever() -> None:
    assert str(EMBEDDED) == "host0:29400"
    assert (EMBEDDED.host, EMBEDDED.port) == ("host0", 29400)


def test_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may change their directory."""
    monkeypatch.chdir(tmp_path)
    assert StoreAddress.parse("etcd-v3://a:1?ca=ca.pem").ca == str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not an endpoint"),
        ("host", "not an endpoint"),
        ("host:x", "not an endpoint"),
        ("a:1,b:1", "not an endpoint"),
        ("etcd-v2://a:1", "not an endpoint"),
        ("etcd-v3://", "not an endpoint"),
        ("etcd-v3://a:1?password=x", "no setting 'password': use ca, cert, key, credentials"),
        ("a:1?ca=/x", "neither users nor TLS: use --rdzv-backend etcd-v3"),
    ],
)
def test_what_is_no_address_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        StoreAddress.parse(text)
    assert "\n" not in str(caught.value)
