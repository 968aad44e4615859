"""Everything that a Trainer has counted, logged and decided, as a part of the session's state.

A replacement makes a new Trainer, and is given this by a replica or by a checkpoint. An interrupted step puts
it back. So it is everything that a step of the Trainer changes besides the model, its optimizer and its
scheduler: ``TrainerState``, ``TrainerControl``, the attributes of callbacks (the patience of
``EarlyStoppingCallback``), and those of the Trainer itself, whatever a subclass has added (the metrics of
TRL's).
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from swift_ft.checkpoint.step.frozen import frozen
from swift_ft.checkpoint.step.kinds import MOST_ELEMENTS
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.placing import Placing
from swift_ft.checkpoint.step.references import UNKNOWN
from swift_ft.errors import CheckpointError

_STAYS = frozenset({"is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs"})
"""Fields of ``TrainerState`` that no worker takes from another one: a resumed run may have other limits."""
_IN_PLACES_OF_THEIR_OWN = frozenset({"current_flos", "train_dataset", "eval_dataset"})
"""Attributes of a Trainer that travel otherwise, or not at all."""


@dataclass
class Place:
    """The place of a training in the Trainer's own order of things.

    Attributes:
        begun: the first epoch is.
        epoch: counted from 0.
        update: updates that are done in this epoch.
        updated: an update is done, and what the Trainer does after one is not.
        over: nothing is left to do.
        learning_rate: the last update had it.
    """

    begun: bool = False
    epoch: int = 0
    update: int = 0
    updated: bool = False
    over: bool = False
    learning_rate: float | None = None


class Progress:
    """The state of a Trainer's loop, as a part of ``Session(state)``.

    Args:
        trainer: whose. Its training begins now.
        place: where it is.
        shared: gathers a vector of each worker.

    Attributes:
        gives_attributes: of each worker's own, which come from the sums of its rank. No variable of a script.
    """

    def __init__(self, trainer: Any, place: Place, shared: Callable[[Tensor], Tensor]) -> None:
        self._trainer = trainer
        self._gather = shared
        self.gives_attributes = ((trainer, "_tr_loss"), (trainer, "current_flos"))
        self.place = place
        self.grad_norm: Any = None  # of the last update
        self._history = _History(trainer.state)
        self._attributes = {"trainer": _Attributes(trainer, _IN_PLACES_OF_THEIR_OWN)}
        self._attributes |= {
            name: _Attributes(callback) for name, callback in _named(trainer.callback_handler.callbacks)
        }
        self._sums = self._own_sums()[None].expand(trainer.args.world_size, -1).clone()

    def share_sums(self) -> None:
        """Give all workers what each has summed up of its own since the last line of the log.

        The Trainer adds them up when it logs. Without this, a lost worker's would be lost.
        """
        self._sums = self._gather(self._own_sums()[None])

    def _own_sums(self) -> Tensor:
        trainer = self._trainer
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        sums[0], sums[1] = trainer._tr_loss, trainer.current_flos
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and tensors."""
        state = {name: value for name, value in vars(self._trainer.state).items() if name not in _STAYS}
        state.pop("log_history")
        return {
            "state": state,
            "log_history": self._history.text(),
            "control": asdict(self._trainer.control),
            "place": asdict(self.place),
            "grad_norm": self.grad_norm,
            "sums": self._sums,
            "attributes": {name: attributes.changed() for name, attributes in self._attributes.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse.

        Raises:
            CheckpointError: it has no attributes of objects, by name.
        """
        _check_attributes(saved.get("attributes"))
        trainer = self._trainer
        vars(trainer.state).update({k: v for k, v in saved["state"].items() if k not in _STAYS})
        self._history.load(saved["log_history"])
        vars(trainer.control).update(saved["control"])
        vars(self.place).update(saved["place"])
        self.grad_norm = saved["grad_norm"]
        self._sums = saved["sums"].to(trainer.args.device)
        own = self._sums[trainer.args.process_index]
        trainer._tr_loss = own[0].to(trainer._tr_loss.dtype)
        trainer.current_flos = own[1].item()
        for name, attributes in self._attributes.items():
            if name in saved["attributes"]:  # else a callback that only this worker has
                attributes.load(saved["attributes"][name])


def _check_attributes(saved: Any) -> None:
    """Refuse what would be taken for a state in which nothing has changed."""
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"the Trainer's part of the state has a {type(saved).__name__} for the attributes of the Trainer "
            "and its callbacks, and not a dict: another version of swift_ft has written it, or a script"
        )
    for name, one in saved.items():
        if not isinstance(one, dict) or not {"values", "others"} <= one.keys():
            raise CheckpointError(
                f"the Trainer's part of the state has no values for the attributes of {name}: another "
                "version of swift_ft has written it, or a script"
            )


def _named(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Each by its class and its number among those of it: workers may have others besides."""
    numbers: Counter[str] = Counter()
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        yield f"{numbers[kind]}.{kind}", callback
        numbers[kind] += 1


class _History:
    """The log of a ``TrainerState`` as a text that grows.

    It is noted at the beginning of each step: copies of a list of thousands of dictionaries would take longer
    than many a step. The Trainer only ever appends to it.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._text, self._count = "", 0

    def text(self) -> str:
        """A line of JSON for each entry: numbers keep all their bits."""
        history = self._state.log_history
        if len(history) < self._count:
            self._text, self._count = "", 0
        self._text += "".join(f"{json.dumps(entry, default=_number)}\n" for entry in history[self._count :])
        self._count = len(history)
        return self._text

    def load(self, text: str) -> None:
        """The inverse."""
        if text == self._text:
            del self._state.log_history[self._count :]
            return
        self._state.log_history[:] = [json.loads(line) for line in text.splitlines()]
        self._text, self._count = text, len(self._state.log_history)


def _number(value: Any) -> Any:
    """A number of NumPy or of torch."""
    return value.item()


class _Attributes:
    """The attributes of an object that have changed since training began, as far as they are plain values.

    What has not changed is as each worker's script makes it, and does not travel: ranks, paths, writers. What
    was plain and no longer is, such as an average in the place of a None, is left as it is.

    Args:
        owner: a Trainer or a callback.
        hidden: names of attributes that are left alone.
    """

    def __init__(self, owner: Any, hidden: Iterable[str] = ()) -> None:
        self._owner = owner
        self._hidden = frozenset(hidden)
        self._start = self._plain()

    def changed(self) -> dict[str, Any]:
        """Their values, and the names of those that were plain and are not now."""
        start, now = self._start, self._plain()
        return {
            "values": {name: value for name, value in now.items() if start.get(name, start) != value},
            "others": [name for name in start if name not in now],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Take these values, and those of the beginning for all that were as at the beginning."""
        now = self._plain()
        start = {name: value for name, value in self._start.items() if name not in saved["others"]}
        for name, value in {**start, **saved["values"]}.items():
            if now.get(name, now) == value:
                continue
            put = Placing().put(vars(self._owner).get(name, MISSING), value)
            if put is not UNKNOWN:
                vars(self._owner)[name] = put

    def _plain(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self._owner).items() if name not in self._hidden}
        copies = {name: frozen(value) for name, value in own.items() if _is_plain(value)}
        return {name: value for name, value in copies.items() if value is not UNKNOWN}


def _is_plain(value: Any) -> bool:
    """Whether a value may travel. Of a long container its copy says it: losses do, and samples do not."""
    if isinstance(value, bool | int | float | str | None):
        return True
    if not isinstance(value, dict | list | deque):
        return False
    if len(value) > MOST_ELEMENTS:
        return True
    if isinstance(value, dict):
        return all(isinstance(key, str | int) for key in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value))
