"""A training of Lightning's in which a worker kills its machine, once: in a hook that Lightning calls.

KILL says as JSON where: ``{"rank": 0, "hook": "validation_step", "global_step": 6}``. The script and its
arguments follow on the command line.
"""

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer import call

from tests.support.machines import die

KILL = json.loads(os.environ["KILL"])
MARK = Path(os.environ["SWIFT_TEST_FOLDER"]) / "struck"


def dying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hook(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        here = (trainer.global_rank, name, trainer.global_step) == (
            KILL["rank"],
            KILL["hook"],
            KILL["global_step"],
        )
        if here and trainer.training | trainer.validating and not MARK.exists():
            MARK.touch()
            die()
        return original(trainer, name, *args, **kwargs)

    return hook


for kind in ("_call_strategy_hook", "_call_lightning_module_hook", "_call_callback_hooks"):
    setattr(call, kind, dying(getattr(call, kind)))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
