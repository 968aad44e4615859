"""The example training, in which worker 0 gets the batch of iteration 3 after 14 seconds."""

import os
import time

import gpt
import train_swift


class Batches(gpt.Batches):
    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        if index == 3 and os.environ["RANK"] == "0":
            stand_still()
        return super().__getitem__(index)


def stand_still() -> None:
    time.sleep(14)


train_swift.Batches = Batches  # type: ignore[misc]
train_swift.main()
