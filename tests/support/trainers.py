"""For scripts with a Trainer of transformers: kills a worker in one of its events, keeps what was made."""

import json
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

TIMED = ("runtime", "per_second", "model_preparation_time")
LEFT_OUT = ("training_args.bin", "README.md")
"""Of what is saved: it names this run's folder; tags in the order of a set of texts."""


class Dies(TrainerCallback):  # type: ignore[misc]
    """Kills its worker, once; with ``all`` as the worker, worker 0 kills all of them."""

    def __init__(self, when: str, marker: Path) -> None:
        rank, updates, self._event = when.split(":")
        own = os.environ["RANK"]
        self._mine = rank == own or (rank == "all" and own == "0")
        self._others = marker.parent if rank == "all" else None
        if self._others is not None:
            (self._others / f"{own}.pid").write_text(str(os.getpid()))
        self._updates, self._marker = int(updates), marker

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("_event"):
            return self._strike
        return super().__getattribute__(name)

    def _strike(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._mine and state.global_step == self._updates and not self._marker.exists():
            self._marker.touch()
            for path in self._others.glob("[1-9].pid") if self._others is not None else ():
                os.kill(int(path.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def keep(trainer: Any, metrics: dict[str, float], folder: Path) -> None:
    """All that the training has made, but for the times, in which no two runs are alike."""
    here = str(folder)
    state = json.loads(json.dumps(vars(trainer.state)).replace(here, "FOLDER"))
    state["log_history"] = [without_times(entry) for entry in state["log_history"]]
    if not trainer.args.should_save:
        del state["stateful_callbacks"]  # the worker that saves fills it in as it does
    saved = {
        "state": state,
        "metrics": without_times(metrics),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "files": files(folder / "trainer", here),
    }
    (folder / "out").mkdir(exist_ok=True)
    torch.save(saved, folder / "out" / f"rank{trainer.args.process_index}.pt")


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of a log, but for what no two runs have alike."""
    return {key: value for key, value in entry.items() if not key.endswith(TIMED)}


def files(folder: Path, here: str) -> dict[str, Any]:
    """What the Trainer has saved, by path: what is in them, or a digest."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in LEFT_OUT or "runs" in path.parts:
            continue
        name, content = str(path.relative_to(folder)), path.read_bytes()
        if path.name in ("optimizer.pt", "scheduler.pt"):  # pickled: the same values may be other bytes
            found[name] = torch.load(path, weights_only=True)
            continue
        if path.name == "trainer_state.json":
            state = json.loads(content.replace(here.encode(), b"FOLDER"))
            state["log_history"] = [without_times(entry) for entry in state["log_history"]]
            content = json.dumps(state).encode()
        found[name] = sha256(content).hexdigest()
    return found
