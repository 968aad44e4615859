"""The example training, where each process keeps its log on a disk of its own until it is uploaded."""

import os
from pathlib import Path
from typing import Any

import train_swift

import swift_ft

DISK = Path(os.environ["SWIFT_TEST_FOLDER"]) / "disks" / str(os.getpid())


class Session(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **{**arguments, "local": DISK})


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
