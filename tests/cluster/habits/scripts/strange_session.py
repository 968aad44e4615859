"""A small data-parallel training. The session of one machine is given something else.

python strange_session.py STORE HABIT. The third worker that starts, or the second one, has another value of
the argument of Session that HABIT names. ``module``: it has edited an own module, on a disk of its own.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
OTHERS = {"checkpoint_every": 5, "seed": 1, "verify": "none", "keep_checkpoints": 1}


def is_strange() -> bool:
    with (FOLDER / "starts").open("ab") as starts:
        starts.write(b".")
        starts.flush()
        return starts.tell() == (2 if HABIT.startswith("first-") else 3)


def own_module(*, edited: bool) -> float:
    """Loads a module as a program does that finds its plugins by itself."""
    path = FOLDER / f"disk-{edited}" / "scale.py"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f"scale.{os.getpid()}")  # several workers write it: none may read half of it
    draft.write_text(f"SCALE = {2.0 if edited else 1.0}\n")
    draft.replace(path)
    spec = importlib.util.spec_from_file_location("scale", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scale"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(module.SCALE)


def main() -> None:
    habit, strange = HABIT.removeprefix("first-"), is_strange()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"checkpoint_every": 3}
    if strange and habit in OTHERS:
        settings[habit] = OTHERS[habit]
    scale = own_module(edited=strange and habit == "module")
    state = {"model": model.module, "optimizer": optimizer}
    session = swift_ft.Session(state, store=STORE, **settings)
    session.attach_ddp(model)
    for step in session.steps(8):
        with step:
            data = torch.Generator().manual_seed(100 * step.index + rank)
            (scale * model(torch.randn(5, 4, generator=data)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    leave(rank, {"model": model.module.state_dict()})


main()
