"""What is said of a store that cannot be written, and what to do."""

from __future__ import annotations

import pytest

from swift_ft.storage.store_errors import not_writable
from swift_ft.storage.store_url import StoreUrl


class NoCredentialsError(Exception):
    """Named as botocore's."""


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
@pytest.mark.parametrize("error", [PermissionError("InvalidAccessKeyId"), NoCredentialsError("none found")])
def test_a_server_that_refuses_the_keys_asks_for_other_keys(url: str, error: Exception) -> None:
    said = str(not_writable(StoreUrl.parse(url), error))
    assert "check the credentials" in said
    assert "directory" not in said


@pytest.mark.parametrize("url", ["/data/run", "file:///data/run"])
def test_a_directory_of_another_user_is_one(url: str) -> None:
    said = str(not_writable(StoreUrl.parse(url), PermissionError("Permission denied")))
    assert "choose a directory that this user can write" in said
