"""An example in which one worker's memory flips one bit at the end of a step (FLIP, as JSON).

``{"example": "train_ddp", "rank": 1, "iteration": 4}`` flips a bit of its first parameter; with ``"field":
"exp_avg"`` one of the optimizer's state. With ``"replayed": true`` it does so when the iteration is replayed.
A fault at the checkpoint of iteration ``"fault"`` waits until all workers have published their digests after
the iteration of the flip.
"""

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import swift_ft
from swift_ft.faults.failpoints import Point
from swift_ft.runtime import fault_injector
from swift_ft.runtime.state_proof import StateProof
from tests.support.waiting import wait_until

flip = json.loads(os.environ["FLIP"])
checked = StateProof.check
example: Any = importlib.import_module(flip["example"])


class PatientFaults(fault_injector.FaultInjector):
    def __call__(self, point: Point, iteration: int, part: int | None) -> None:
        if point == Point.CHECKPOINT and iteration == flip.get("fault"):
            ranks = range(torch.distributed.get_world_size())
            wait_until(lambda: all(_proven(rank, flip["iteration"] + 1).exists() for rank in ranks), "proofs")
        super().__call__(point, iteration, part)


def check(self: StateProof, *args: Any, **how: Any) -> None:
    checked(self, *args, **how)
    self._writer.do(_proven(self._rank, args[1]).touch)


def _proven(rank: int, iteration: int) -> Path:
    return Path(os.environ["SWIFT_TEST_FOLDER"]) / f"proven-{rank}-{iteration}"


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


StateProof.check = check
fault_injector.FaultInjector = PatientFaults  # type: ignore[misc]
swift_ft.Session = Session  # type: ignore[misc]
example.main()
