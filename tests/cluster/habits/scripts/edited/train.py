"""A small data-parallel training whose own files are edited while it runs. What is in them then is shown.

python train.py STORE HABIT

save      an editor saves all files, with other values
checkout  another branch is checked out: files are gone, and the main script is another one
"""

import importlib
import inspect
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
HERE = Path(__file__).absolute().parent
LEARNING_RATE = 0.1
MODEL = importlib.import_module("edited.model" if __package__ else "model")  # no text names it


def edit() -> None:
    (HERE / "edited").touch()
    texts = {"train.py": ("0.1", "0.7"), "model.py": ("Tanh", "ReLU"), "later.py": ("2.0", "3.0")}
    for name, (old, new) in texts.items():
        path = HERE / name
        text = path.read_text().replace(old, new) + "\nprint('EDITED', __name__)\n"
        path.unlink()
        if HABIT == "save" or name == "train.py":
            path.write_text(text)


def scale() -> float:
    if __package__:
        from .later import SCALE
    else:
        from later import SCALE  # type: ignore[import-not-found, no-redef]  # it is beside this script
    return float(SCALE)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(MODEL.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    state = {"model": model.module, "optimizer": optimizer}
    session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
    session.attach_ddp(model)
    for step in session.steps(8):
        if step.index == 3 and rank == 0 and not (HERE / "edited").exists():
            edit()
        with step:
            data = torch.Generator().manual_seed(100 * step.index + rank)
            factor = scale() if step.index > 4 else 1.0
            (factor * model(torch.randn(5, 4, generator=data)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "Tanh" in inspect.getsource(MODEL), "compilers read this"
    leave(rank, {"model": model.module.state_dict()})


main()
