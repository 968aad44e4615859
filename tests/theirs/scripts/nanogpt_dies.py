"""The example in nanoGPT's loop, whose first worker is lost as it saves its second best model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.machines import die, is_first_process

save = torch.save
saved: list[Any] = []


def save_or_die(what: Any, path: Any) -> None:
    saved.append(path)
    if is_first_process() and [getattr(one, "name", "") for one in saved].count("best.pt") == 2:
        die()
    save(what, path)


sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "integrations"))
vars(torch)["save"] = save_or_die
importlib.import_module("nanogpt_swift").main()
