"""Each value of a state is compared whole: in objects, in arrays of objects, with its dtype and shape."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from swift_ft.checkpoint.plain_values import Encoder
from swift_ft.checkpoint.restored_values import restored
from swift_ft.checkpoint.state_values import digests_of


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Span(NamedTuple):
    first: Any
    last: Any


@dataclasses.dataclass
class Averages:
    weights: Any
    rate: float = 0.5


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


LONG = torch.arange(100_000.0)
"""repr() leaves out what is in the middle of it."""
OTHER = LONG.clone()
OTHER[50_000] = -1


def of_objects(value: Any) -> np.ndarray[Any, Any]:
    array = np.empty(2, object)
    array[:] = [1, value]
    return array


@pytest.mark.parametrize(
    "wrap",
    [
        Averages,
        lambda value: Averages([{"deep": value}]),
        lambda value: Span(0, value),
        lambda value: types.SimpleNamespace(inner=value),
        of_objects,
        Plain,
        lambda value: {"list": [value]},
        lambda value: collections.deque([value]),
    ],
    ids=["dataclass", "deep", "namedtuple", "namespace", "object array", "object", "list", "deque"],
)
def test_one_element_of_a_tensor_anywhere_tells(wrap: Any) -> None:
    one, same, other = digests_of(wrap(LONG)), digests_of(wrap(LONG.clone())), digests_of(wrap(OTHER))
    assert one == same
    assert len(one) == len({name: d for name, d in one.items() if name in other})
    assert sum(one[name] != other[name] for name in one) == 1


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(0), torch.zeros(0, 3)),
        (torch.tensor(1 + 2j).conj(), torch.tensor(1 + 2j)),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (torch.eye(3).to_sparse(), torch.eye(3)),
        (np.zeros(4), np.zeros((2, 2))),
        (Averages(1), Averages(2)),
        (Color.RED, Color.BLUE),
        ({Span(1, 2)}, {Span(1, 3)}),
        ({1: "a", "1": "b"}, {1: "b", "1": "a"}),
        (io.BytesIO(b"one"), io.BytesIO(b"two")),
        (range(10**9), range(10**9 + 1)),
        (bytearray(b"one"), bytearray(b"two")),
        (float("nan"), 0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unlike_values_have_unlike_digests(value: Any, other: Any) -> None:
    assert digests_of(value) == digests_of(value)
    assert digests_of(value) != digests_of(other)


@pytest.mark.parametrize("view", [LONG[::2], LONG.view(10, -1).t(), LONG[:1].expand(3), LONG[7]])
def test_the_values_of_a_view_count_and_not_its_strides(view: torch.Tensor) -> None:
    assert digests_of(view) == digests_of(view.clone(memory_format=torch.contiguous_format))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("way", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_compared(way: str) -> None:
    def compressed(values: torch.Tensor) -> torch.Tensor:
        size = ((2, 2),) if way.startswith("b") else ()
        made: torch.Tensor = getattr(values, f"to_sparse_{way}")(*size)
        return made

    one = compressed(torch.eye(4))
    assert digests_of(one) == digests_of(one.clone())
    assert digests_of(one) != digests_of(compressed(2 * torch.eye(4)))
    assert digests_of(one) != digests_of(torch.eye(4))


@pytest.mark.parametrize(
    "value",
    [
        Averages(LONG),
        Averages(Span(Color.RED, np.arange(3))),
        Span(1, Averages([torch.ones(2)])),
        types.SimpleNamespace(a=Averages(None), b=of_objects(Span(1, 2))),
        {"sets": {1, 2}, "frozen": frozenset({Color.RED, Color.BLUE}), Color.RED: "key"},
        collections.OrderedDict(a=collections.Counter("aab")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_was_saved_is_what_was_there(value: Any) -> None:
    """Also for a reader that knows none of the classes."""
    assert digests_of(restored(Encoder(None).encode(value))) == digests_of(value)


def test_an_object_without_words_is_compared_by_what_it_holds() -> None:
    assert digests_of(Plain(1)) == digests_of(Plain(1)) != digests_of(Plain(2))


@pytest.mark.parametrize("empty", [[], (), {}, collections.deque(), collections.OrderedDict()], ids=repr)
def test_nothing_in_a_container_is_not_no_container(empty: Any) -> None:
    """A list that has lost all of its elements is still there."""
    assert digests_of({"a": 1, "b": empty}).keys() == {".a", ".b"}
    assert digests_of({"b": empty}) != digests_of({"b": [0]})
    assert digests_of(restored(Encoder(None).encode({"b": empty}))) == digests_of({"b": empty})
