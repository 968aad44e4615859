"""The words of one line of a scenario."""

from __future__ import annotations

import shlex

from swift_ft.recovery.job_state import State

NOTHING = "nothing"
"""The word in a line for nothing, where something could be named."""


class ScenarioError(AssertionError):
    """A line does not hold, or cannot be read."""


class Line:
    """The words of a line: in order, and by name (``name=value``). Readers take words until none is left."""

    def __init__(self, text: str) -> None:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
        self._options = dict(w.split("=", 1) for w in words if "=" in w and " " not in w.split("=", 1)[0])
        self._words = [w for w in words if w not in {f"{k}={v}" for k, v in self._options.items()}]

    def __bool__(self) -> bool:
        return bool(self._words)

    def take(self) -> str:
        """The next word."""
        if not self._words:
            raise ScenarioError("the line ends too early")
        return self._words.pop(0)

    def skip(self, expected: str) -> None:
        """Take a word that has to be there."""
        if (word := self.take()) != expected:
            raise ScenarioError(f"found {word!r} instead of {expected!r}")

    def rest(self) -> list[str]:
        """All other words."""
        words, self._words = self._words, []
        return words

    def text(self, default: str = "") -> str:
        """All other words as one text."""
        return " ".join(self.rest()) or default

    def flag(self, name: str) -> bool:
        """Whether a word occurs anywhere."""
        found = name in self._words
        if found:
            self._words.remove(name)
        return found

    def option(self, name: str) -> str | None:
        """The value of a named word."""
        return self._options.pop(name, None)

    def number(self, name: str, default: int) -> int:
        """The value of a named word, as a number."""
        return int(self._options.pop(name, default))

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            ScenarioError: for words that were not understood.
        """
        if self._words or self._options:
            raise ScenarioError(f"not understood: {self._words} {self._options}")


def number_or_none(word: str) -> int | None:
    """A number, or None for ``nothing``."""
    return None if word == NOTHING else int(word)


def numbers(word: str | None) -> tuple[int, ...]:
    """Numbers with commas between them; none for None."""
    return () if word is None else tuple(map(int, word.split(",")))


def ranks_of(state: State, word: str) -> list[int]:
    """One rank, several with commas between them, or ``all``."""
    return list(range(state.world_size)) if word == "all" else [int(rank) for rank in word.split(",")]


def next_ranks_of(state: State, word: str) -> list[int]:
    """The same for workers of the next world; ``all`` of them are none if no change is under way."""
    change = state.worlds.change
    machines = change.world.machines if change is not None else ()
    if word == "all":
        return list(range(len(machines) * state.shape.workers_per_machine))
    return [int(rank) for rank in word.split(",")]


def started_in_of(state: State, machine: str) -> int:
    """The generation in which a member's workers were started; -1 for a machine that is not a member."""
    slot = state.slot_of(machine)
    return -1 if slot is None else state.membership.started_in[slot]
