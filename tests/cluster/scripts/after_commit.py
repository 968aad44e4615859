"""The example training, in any store. Iteration 8 begins once the checkpoint of iteration 6 is committed."""

import sys
import time
from collections.abc import Iterator

import train_swift

import swift_ft
from swift_ft.storage.store import Store

URL = [value for flag, value in zip(sys.argv, sys.argv[1:], strict=False) if flag == "--store"][-1]


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if step.index == 8 and not step.replayed:
                wait_for_the_checkpoint()
            yield step


def wait_for_the_checkpoint() -> None:
    store = Store(URL)
    for _ in range(300):
        if store.read_json("checkpoints/00000006/committed.json") is not None:
            return
        time.sleep(0.1)
    raise TimeoutError("no checkpoint was committed")


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
