"""Lines about variables that travel, or do not."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from swift_ft.checkpoint.step.places import Place, in_words
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)


def say_unlike_at_top(variables: Iterable[str]) -> None:
    """The lines at the top of the epoch have made others of them than those taken over."""
    names = sorted({*variables})
    _logger.warning(
        "the lines at the top of the epoch have set %s to other values than where this state comes "
        "from: right if each worker has its own, wrong if they are made of weights or of the time",
        shortened(names),
        extra={"event": "variables_of_epoch_unlike", "variables": names},
    )


def say_set_by_handlers(places: Iterable[Place]) -> None:
    """The run before got a signal, and this one was started to go on."""
    names = [in_words(place) for place in sorted(places)]
    _logger.info(
        "%s, which a signal handler of this script sets, had changed in the run before: here it is "
        "as the script begins",
        shortened(names),
        extra={"event": "signal_of_earlier_run", "variables": names},
    )


def say_given_at_start(places: Iterable[Place]) -> None:
    """An earlier process in this place began with other values, and so does this one."""
    names = [in_words(place) for place in sorted(places)]
    _logger.info(
        "this script has set %s before its first step otherwise than when the run began: it goes on "
        "with the values of then, which were the same on another machine",
        shortened(names),
        extra={"event": "start_values_given", "variables": names},
    )


def say_missing(place: Place) -> None:
    """A value has come for which this process has nothing."""
    _logger.warning(
        "%s.%s has changed since the start of training, and this process has nothing in that place yet: "
        "make it before the first step, by a name or key that is the same in each process, so that a "
        "replacement has it too",
        *place,
        extra={"event": "variable_missing", "variable": ".".join(place)},
    )


def say_not_taken(place: Place, words: str) -> None:
    """A value has changed that no checkpoint can hold."""
    _logger.warning(
        "%s (%s) has changed since the start of training, and cannot travel with the state. In this "
        "process it is another one, so what follows from it differs. Let a module of Session(state) "
        "hold it, or an object with state_dict() and load_state_dict()",
        in_words(place),
        words,
        extra={"event": "variable_not_taken", "variable": ".".join(place)},
    )
