"""An example in which one worker's memory flips one bit at the end of a step (FLIP, as JSON).

``{"example": "train_ddp", "rank": 1, "iteration": 4}`` flips a bit of its first parameter; with ``"field":
"exp_avg"`` one of the optimizer's state. With ``"replayed": true`` it does so when the iteration is replayed.
"""

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import swift_ft

flip = json.loads(os.environ["FLIP"])
example: Any = importlib.import_module(flip["example"])


class Session(swift_ft.Session):
    def __init__(self, state: Mapping[str, Any], **arguments: Any) -> None:
        super().__init__(state, **{**arguments, **flip.get("arguments", {})})
        self._state = state

    def steps(self, iterations: int) -> Iterator[Any]:
        mine = torch.distributed.get_rank() == flip["rank"]
        for step in super().steps(iterations):
            yield step
            due = (step.index, step.replayed) == (flip["iteration"], flip.get("replayed", False))
            if mine and due:
                self._flip()
                mine = False

    def _flip(self) -> None:
        optimizer = self._state["optimizer"]
        tensor = parameter = optimizer.param_groups[0]["params"][0]
        if field := flip.get("field"):
            tensor = optimizer.state[parameter][field]
        tensor.data.view(torch.int32).view(-1)[0] ^= 1


swift_ft.Session = Session  # type: ignore[misc]
example.main()
