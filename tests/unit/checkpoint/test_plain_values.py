"""What is saved can be read: values come back equal, of the same type, and nothing is executed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.checkpoint.plain_classes import KnownClasses, Unknown
from swift_ft.checkpoint.plain_values import classes_in
from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.errors import UnsupportedError


class Phase(enum.Enum):
    WARM = "warm"
    HOT = 2


class Bits(enum.Flag):
    A = 1
    B = 2
    AB = 3
    C = 4


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Meter:
    total: float
    seen: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        raise AssertionError("reading calls nothing")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: np.float32


class Pair(NamedTuple):
    one: Any
    other: Any


class Strange:
    def __init__(self) -> None:
        self.value = 3


def meter(total: float) -> Meter:
    made = object.__new__(Meter)
    made.total, made.seen = total, [1]
    return made


KNOWN = KnownClasses([Phase, Bits, Level, Meter, Point, Pair])


def back(value: Any, known: KnownClasses = KNOWN) -> Any:
    return unpack(pack(value, known), known=known)


VALUES: list[Any] = [
    None,
    True,
    1 << 80,
    (1 << 2039) - 1,
    1 << 2039,
    -(1 << 2039),
    1 << 5000,
    -(1 << 5000) - 1,
    [1 << 5000],
    (1, 1 << 5000),
    {"a": [1 << 5000]},
    {1 << 5000: 1},
    {(1, 1 << 5000): 1 << 5001},
    {1 << 5000, 1},
    frozenset({(1 << 5000,)}),
    deque([1 << 5000], maxlen=2),
    range(1 << 5000),
    -0.0,
    2.5 - 1j,
    b"\x00\xff",
    b"",
    bytearray(b"ab"),
    bytearray(),
    "text",
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    {1, 2},
    frozenset({("a", 1)}),
    {frozenset({1}), pathlib.PurePosixPath("x")},
    Counter("abca"),
    OrderedDict([("b", 1), ("a", np.float32(2))]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {Phase.WARM: 1}),
    deque([1, np.int64(2)], maxlen=5),
    {("a", 1): 2, None: 3, np.int64(4): 5},
    {"swift_ft.plain": "deque"},
    np.float64(1.5),
    np.float32(0.1),
    np.int64(7),
    np.bool_(True),
    np.str_("text"),
    np.str_(""),
    np.datetime64("2026-01-02T03:04"),
    np.longdouble("1.1"),
    pathlib.Path("/a/b"),
    pathlib.PureWindowsPath("a\\b"),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, fold=1),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "here")),
    datetime.date(2026, 1, 2),
    datetime.timedelta(days=-1, microseconds=3),
    uuid.UUID(int=5),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    range(1, 9, 2),
    slice(1, None),
    Ellipsis,
    types.SimpleNamespace(a=[1], b=np.int8(2)),
    Phase.HOT,
    Level.LOW,
    Bits.A | Bits.C,
    Bits(0),
    meter(2.0),
    Point(1, np.float32(2)),
    Pair(Phase.WARM, [deque([1])]),
]


def test_what_is_read_back_once_is_not_what_is_short() -> None:
    """Types that were packed before are not read back at once: a long integer is seen by itself."""
    for value in (1, 1 << 5000, -(1 << 5000)):
        for nested in ({"a": [value]}, {value: 1}, {value}, (value, [value])):
            assert back(nested) == nested


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back(value: Any) -> None:
    nested = {"a": [value, (value,)]}
    for found in (back(value), back(nested)["a"][0], back(nested)["a"][1][0]):
        assert type(found) is type(value)
        assert found == value
        assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.array(3, np.uint64),
        np.zeros((0, 4), bool),
        np.array(["a", "bcd"]),
        np.array(["2026-01-01", "NaT"], "datetime64[D]"),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8", (1,))]),
        np.arange(8, dtype=">f4")[::2],
        np.array([np.nan, -0.0]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_comes_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    found = back({"history": array})["history"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape, found.flags.fnc) == (array.dtype, array.shape, array.flags.fnc)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_an_array_of_objects_comes_back() -> None:
    array = np.array([[1, "a"], [Phase.HOT, None]], object)
    found = back(array)
    assert found.dtype == object
    assert found.tolist() == array.tolist()


def test_numpys_random_state_comes_back() -> None:
    for generator in (np.random.default_rng(3), np.random.Generator(np.random.MT19937(4))):
        generator.normal(size=3)
        saved = back(generator.bit_generator.state)
        expected = generator.normal(size=4)
        generator.bit_generator.state = saved
        assert np.array_equal(generator.normal(size=4), expected)


def test_a_file_in_memory_comes_back_with_its_position() -> None:
    file = io.BytesIO(b"abcdef")
    file.seek(2)
    assert back(file).read() == b"cdef"


def test_a_maxlen_and_a_default_still_hold() -> None:
    found = back({"d": deque([1, 2], maxlen=2), "f": defaultdict(int)})
    found["d"].append(3)
    assert list(found["d"]) == [2, 3]
    assert found["f"]["new"] == 0


def test_what_is_shared_is_shared_afterwards() -> None:
    shared = deque([np.int64(1)])
    found = back({"a": shared, "b": [shared]})
    assert found["a"] is found["b"][0]
    circle: list[Any] = [1]
    circle.append({"back": circle})
    found = back(circle)
    assert found[1]["back"] is found
    ring: deque[Any] = deque()
    ring.append(ring)
    found = back(ring)
    assert found[0] is found


def test_the_attributes_of_a_state_dict_come_back() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert back(state)._metadata == state._metadata  # type: ignore[attr-defined]  # torch sets it


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(np.float32, st.floats(width=32, allow_nan=False))
    | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.datetimes()
    | st.sampled_from([*Phase, *Bits, pathlib.PurePosixPath("a")]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.sampled_from(Phase), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.sets(st.integers() | st.sampled_from(Phase), max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_any_nesting_comes_back(value: Any) -> None:
    found = back(value)
    assert found == value
    assert pickle.dumps(_types(found)) == pickle.dumps(_types(value))


def _types(value: Any) -> Any:
    inner: Any = ()
    if isinstance(value, dict):
        inner = [(_types(key), _types(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple | deque):
        inner = [_types(item) for item in value]
    return type(value).__name__, inner


def test_values_of_earlier_versions_are_read() -> None:
    """They were written as they are."""
    old = {"a": OrderedDict(x=Counter("ab")), "s": {1}, "t": (torch.ones(2), torch.float32), "b": b"1"}
    file = io.BytesIO()
    torch.save(old, file)
    found = unpack(file.getvalue())
    assert torch.equal(found["t"][0], torch.ones(2))
    assert type(found["a"]) is OrderedDict
    assert found["a"]["x"] == Counter("ab")
    assert (found["s"], found["b"]) == ({1}, b"1")


def test_values_of_a_later_version_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="'novel', which a later version"):
        unpack(pack_raw({"swift_ft.plain": "novel"}))


def pack_raw(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"history": [0, 1, 2, Strange()]}, r"\['history'\]\[3\] is a .*test_plain_values.Strange which"),
        ({"f": (lambda: 1,)}, r"\['f'\]\[0\] is a function which cannot be read back"),
        ({"a": {"b": np.array([1]).view(np.matrix)}}, r"\['a'\]\['b'\] is a numpy.*matrix which"),
        ({"d": deque([Strange])}, r"\['d'\]\[0\] is a type which"),
        (
            {"d": defaultdict(lambda: 1)},
            r"\['d'\] is a collections.defaultdict whose default",
        ),
        ([torch.Generator()], r"\[0\] is a torch._C.Generator which"),
    ],
)
def test_what_cannot_be_read_is_named_when_it_is_saved(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named) as caught:
        pack(value, KNOWN)
    assert "give " in str(caught.value)


def test_it_is_named_each_time() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="Strange"):
            pack({"x": Strange()})


def test_what_the_script_told_torch_is_safe_is_saved() -> None:
    with torch.serialization.safe_globals([Strange]):
        assert back({"x": Strange()})["x"].value == 3


def test_a_class_that_its_reader_would_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"\['p'\] is a .*Phase whose class was not in the state"):
        pack({"p": Phase.HOT})
    known = KnownClasses(classes_in({"seen": [Phase.WARM]}))
    assert back({"p": Phase.HOT}, known) == {"p": Phase.HOT}


def test_classes_of_the_modules_in_which_the_parts_are_made_are_known() -> None:
    known = KnownClasses(homes=[__name__])
    assert back({"p": Phase.HOT, "m": meter(1.0)}, known) == {"p": Phase.HOT, "m": meter(1.0)}
    assert known.find(f"{__name__}:Strange") is None, "only those that are made without being called"
    assert known.find(f"{__name__}:pickle.Pickler") is None


def test_a_reader_without_the_class_gets_what_it_can_compare_and_write() -> None:
    data = pack({"p": Phase.HOT, "m": meter(1.0)}, KNOWN)
    found = unpack(data)
    assert found["p"] == Unknown("enum", f"{__name__}:Phase", ["HOT"])
    assert unpack(pack(found), known=KNOWN) == {"p": Phase.HOT, "m": meter(1.0)}


def test_two_local_classes_of_one_name_are_not_taken_for_each_other() -> None:
    def local() -> type[enum.Enum]:
        class Same(enum.Enum):
            A = 1

        return Same

    one, other = local(), local()
    with pytest.raises(UnsupportedError, match="was not in the state"):
        pack(one["A"], KnownClasses([one, other]))
    assert back(one["A"], KnownClasses([one])) is one["A"]


def test_a_flag_with_bits_without_a_name_is_refused() -> None:
    class Open(enum.IntFlag):
        A = 1

    with pytest.raises(UnsupportedError, match="bits that have no name"):
        pack(Open(9), KnownClasses([Open]))


def test_a_named_tuple_of_an_older_kind() -> None:
    made = collections.namedtuple("made", "a b")  # scripts write it so
    assert back(made(1, np.int64(2)), KnownClasses([made])) == made(1, 2)


@pytest.mark.parametrize("key", [torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), (torch.zeros(1), 1)])
@pytest.mark.parametrize("made", [lambda key: {key: 1}, lambda key: {key}, lambda key: frozenset([key])])
def test_a_tensor_as_a_key_is_refused(made: Any, key: Any) -> None:
    """A reader's tensor is another one: no script would find it."""
    with pytest.raises(UnsupportedError, match="names or numbers as keys"):
        pack({"state": made(key)})
