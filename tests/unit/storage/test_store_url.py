"""The URL of a store, as users write it."""

from __future__ import annotations

import pytest

from swift_ft.storage.store_url import StoreUrl


@pytest.mark.parametrize(
    ("given", "full", "create"),
    [
        ("s3://bucket/run", "s3://bucket/run", False),
        ("s3://bucket/run?create=true", "s3://bucket/run", True),
        ("s3://bucket/run?create=true.old", "s3://bucket/run?create=true.old", False),
        ("/data/run?create=true", "/data/run?create=true", False),
        ("runs/a", "runs/a", False),
    ],
)
def test_what_a_url_names(given: str, full: str, create: bool) -> None:
    assert StoreUrl.parse(given) == StoreUrl(full, create)


@pytest.mark.parametrize(
    ("full", "shown"),
    [
        ("s3://key:se@cret@bucket/run", "s3://bucket/run"),
        ("memory://host:80/a@b", "memory://host:80/a@b"),
        ("file:///a:b@c", "file:///a:b@c"),
    ],
)
def test_credentials_are_not_shown(full: str, shown: str) -> None:
    url = StoreUrl(full)
    assert str(url) == shown
    assert url.redacted(f"cannot open {full}") == f"cannot open {shown}"
    assert url.child("x/y") == f"{full}/x/y"


def test_the_root_of_a_store_in_memory() -> None:
    assert StoreUrl("memory://").child("x") == "memory://x"
