"""Functions that remember their results (``functools.cache``): an interrupted step's are forgotten.

They are computed again in the repeated step, from the same random numbers. A replacement has none of an
earlier step. Such a function shows the dictionary that its results are in to Python's collector only.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.kinds import CONTAINERS, GENERATORS, is_object, is_understood

_MARK = next(
    (one for one in gc.get_referents(functools.lru_cache(maxsize=1)(int)) if type(one) is object), None
)
"""Between the arguments of a call and those given by name, where results are found by them."""


class Remembered:
    """The results of one function at one moment.

    Args:
        function: of :data:`swift_ft.checkpoint.step.kinds.CACHE`.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._info = function.cache_info()

    @property
    def changed(self) -> bool:
        """Whether results came since."""
        now = self._function.cache_info()
        return bool((now.misses, now.currsize) != (self._info.misses, self._info.currsize))

    def put_back(self) -> None:
        """Forget those that came since.

        Where it keeps only so many, all are forgotten, unless some may change in themselves, or are an
        iterator or a library's object: those that were there before have changed in earlier steps.
        """
        if not self.changed:
            return
        if self._info.maxsize is None:
            for results in _dictionaries_of(self._function):
                while len(results) > self._info.currsize:
                    results.popitem()  # the last one that came
        elif not results_in(self._function) and all(map(_is_understood, _remembered_by(self._function))):
            self._function.cache_clear()


def results_in(function: Any) -> list[Any]:
    """All that a function remembers and that may change in itself."""
    if function.cache_info().maxsize is None:
        found = [result for results in _dictionaries_of(function) for result in results.values()]
    else:  # results are referents themselves, and so is a dictionary of Python's that leads to their places
        found = [one for one in _referents_of(function) if not _leads_to_places(one)]
    kinds = (*CONTAINERS, torch.Tensor, np.ndarray, *GENERATORS)
    return [one for one in found if isinstance(one, kinds) or is_object(one)]


def _remembered_by(function: Any) -> list[Any]:
    """Results of a function that keeps only so many, and what they are found by."""
    found = [one for one in _referents_of(function) if one is not function.__wrapped__]
    return [one for one in found if not _leads_to_places(one)]


def _is_understood(one: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_is_understood, one))
    return one is _MARK or is_understood(one)


def _referents_of(function: Any) -> list[Any]:
    return [one for one in gc.get_referents(function) if one is not vars(function)]


def _dictionaries_of(function: Any) -> list[dict[Any, Any]]:
    return [one for one in _referents_of(function) if type(one) is dict]


def _leads_to_places(found: Any) -> bool:
    if type(found) is not dict or not found:
        return False
    return all(type(value).__name__ == "_lru_list_elem" for value in found.values())
