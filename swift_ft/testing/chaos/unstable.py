"""All in which two undisturbed runs of a script differ: it is not compared, since it would tell nothing.

Files may be named after the time or a process, and hold times. Variables of the script may, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

FILE = "file "
"""Before the path of each file, where values have the name of a worker."""
_CARRIED = re.compile(r"worker \d+\.plain\.bytes\.carried\.")
_VARIABLE = re.compile(_CARRIED.pattern + r"(\([a-z ]+\)|[^.]*)\.[^.]+")
_WORD = re.compile(r"([^\W_]+)")
_ANY = "*"
_ALL_IN_IT = ".*"

State = Mapping[str, str]


def variable_of(name: str) -> str | None:
    """The variable of the script that a saved value is, or is in; None for any other value or file."""
    found = _VARIABLE.match(name)
    return found.group() if found is not None else None


@dataclass(frozen=True, slots=True)
class Unstable:
    """All that is not compared.

    Attributes:
        unlike: names that both undisturbed runs have, with other contents.
        single: names that only one of them has.
        patterns: a third run has other such names. ``*`` in a file's stands for letters and digits, ``.*``
            after a variable's for all that is in it.
    """

    unlike: frozenset[str] = frozenset()
    single: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()

    @classmethod
    def between(cls, one: State, other: State) -> Unstable:
        """All in which two undisturbed runs differ."""
        both = one.keys() & other.keys()
        unlike = {name for name in both if one[name] != other[name]}
        only, only_there = one.keys() - both, other.keys() - both
        of_files = _patterns(filter(_is_file, only), filter(_is_file, only_there))
        single = only | only_there
        changing = {place for name in single if (place := variable_of(name)) is not None}
        whole = {*_whole(unlike, one.keys() | other.keys())} | {f"{place}{_ALL_IN_IT}" for place in changing}
        inside = {name for name in unlike if any(_is_in(name, pattern) for pattern in whole)}
        return cls(frozenset(unlike - inside), frozenset(single), frozenset({*of_files, *whole}))

    @property
    def names(self) -> frozenset[str]:
        """All that is left out, as people read it: names of which there is a pattern are not repeated."""
        known = {name for name in self.single if any(_matches(name, one) for one in self.patterns)}
        return self.unlike | self.patterns | (self.single - known)

    @property
    def of_the_state(self) -> list[str]:
        """Those that are neither files nor variables: what the session itself protects."""
        found = self.unlike | self.single
        return sorted(name for name in found if not _is_file(name) and not _CARRIED.match(name))

    def compared(self, state: State, expected: State) -> list[str]:
        """The names of all that is compared."""
        names = (state.keys() | expected.keys()) - self.unlike
        return sorted(name for name in names if not self._is_out(name, expected))

    def differing(self, state: State, expected: State) -> list[str]:
        """The names of values and files that differ; also of those that should be there, whatever they hold.

        Of files of a pattern there should be one at least.
        """
        names = self.compared(state, expected)
        found = [name for name in names if state.get(name) != expected.get(name)]
        found += [name for name in self.unlike - state.keys() if not self._is_out(name, expected)]
        of_files = filter(_is_file, self.patterns)
        return sorted([*found, *(p for p in of_files if not any(_matches(name, p) for name in state))])

    def _is_out(self, name: str, expected: State) -> bool:
        """Whether a name is not compared. Of files, one that both undisturbed runs have always is."""
        if name in self.single:
            return True
        known = _is_file(name) and name in expected
        return not known and any(_matches(name, pattern) for pattern in self.patterns)


def _is_file(name: str) -> bool:
    return name.startswith(FILE)


def _is_in(name: str, pattern: str) -> bool:
    """Whether a value is a variable of which nothing is compared, or is in it."""
    place = pattern.removesuffix(_ALL_IN_IT)
    return name == place or name.startswith(f"{place}.")


def _matches(name: str, pattern: str) -> bool:
    if not _is_file(pattern):
        return _is_in(name, pattern)
    parts = map(re.escape, pattern.split(_ANY))
    return re.fullmatch(r"[^\W_]+".join(parts), name) is not None


def _patterns(names: Iterable[str], others: Iterable[str]) -> set[str]:
    """The patterns of names of which each run has some."""
    here, there = {_pattern(name) for name in names}, {_pattern(name) for name in others}
    return {
        pattern for one in here for other in there if (pattern := _joined(one, other)) and _ANY in pattern
    }


def _pattern(name: str) -> str:
    """A name without its numbers, and without all that has a digit, such as parts of a random name."""
    kind, path = name[: len(FILE)], name[len(FILE) :]
    words = _WORD.split(path)
    return kind + "".join(_ANY if any(letter.isdigit() for letter in word) else word for word in words)


def _joined(one: str, other: str) -> str:
    """The pattern of both; empty if they are unlike. A part of a random name may happen to have no digit."""
    words, others = (re.split(r"([^\W_]+|\*)", name) for name in (one, other))
    if len(words) != len(others):
        return ""
    pairs = list(zip(words, others, strict=True))
    if any(word != same and _ANY not in (word, same) for word, same in pairs):
        return ""
    return "".join(word if word == same else _ANY for word, same in pairs)


def _whole(unlike: Collection[str], names: Iterable[str]) -> Iterator[str]:
    """The largest containers, up to variables, in which all values are unlike: a list of times."""
    mixed = {above for name in names if name not in unlike for above in _above(name)}
    for name in unlike:
        above = next((one for one in _above(name) if one not in mixed), name)
        if above != name:
            yield f"{above}{_ALL_IN_IT}"


def _above(name: str) -> Iterator[str]:
    """The containers that a value is in, the variable first."""
    place = variable_of(name)
    if place is None or place == name:
        return
    yield place
    for part in name[len(place) + 1 :].split(".")[:-1]:
        place = f"{place}.{part}"
        yield place
