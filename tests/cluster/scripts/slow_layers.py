"""An example training of a LayerStack whose layers take as long as LAYER_S says, on any machine.

So more machines are faster, however few processors the host has. Nothing that is computed depends on it. With
``DRAIN``, the machine of that slot is asked to leave before iteration 12. With ``STARVE``, worker 1 ends each
time before that iteration, as if by the kernel for want of memory.
"""

import importlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import gpt
from torch import nn

import swift_ft
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause

LAYER_S = float(os.environ["LAYER_S"])
DRAIN = os.environ.get("DRAIN", "")
STARVE = os.environ.get("STARVE", "")
KILLED = "worker 1 was killed by SIGKILL: the kernel was out of memory"
make_layer = gpt.build_layer


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        participant = self._assembly._participant
        for step in super().steps(iterations):
            if DRAIN and step.index == 12 and participant.context.rank == 0 and not step.replayed:
                machine = participant.state.membership.members[int(DRAIN)]
                participant.append(ev.DrainRequested(machine=machine, asked_by="the test"))
            if STARVE and step.index == int(STARVE) and participant.context.rank == 1 and not step.replayed:
                machine = participant.state.membership.members[1]
                participant.append(ev.MachineLost(machine=machine, reason=KILLED, cause=Cause.MEMORY))
                os.kill(os.getpid(), signal.SIGKILL)
            yield step


def build_layer(number: int, config: gpt.Config) -> nn.Module:
    layer = make_layer(number, config)
    layer.register_forward_pre_hook(_take_time)
    return layer


def _take_time(layer: nn.Module, inputs: Any) -> None:
    time.sleep(LAYER_S)


gpt.build_layer = build_layer
swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ.get("EXAMPLE", "train_elastic")).main()
