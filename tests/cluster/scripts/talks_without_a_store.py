"""``talks.py`` with a store behind a network that takes no log: workers have it from each other."""

import importlib
from pathlib import Path

from swift_ft.storage.store import Store

upload = Store.upload


def upload_no_log(self: Store, local: Path, path: str) -> None:
    if path.startswith("log/"):
        raise ConnectionError("the store is away")
    upload(self, local, path)


Store.remote = property(lambda self: True)  # type: ignore[assignment]
Store.upload = upload_no_log
importlib.import_module("talks").main()
