"""The newest blocks that a relay has read, for those that follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

_MOST_BLOCKS = 4096
_MOST_CHARACTERS = 16 << 20


class RecentBlocks:
    """Neighbouring blocks, up to the newest. The relay's lock guards it.

    Attributes:
        end: the number after the newest block.
    """

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._characters = 0
        self.end = 0

    @property
    def start(self) -> int:
        """The number of the oldest block that is here."""
        return self.end - len(self._texts)

    def add(self, number: int, text: str) -> bool:
        """Add the next block. False if it is here already. After a gap, what was before it is forgotten."""
        if self.start <= number < self.end:
            return False
        if number != self.end:
            self._texts.clear()
            self._characters = 0
        self.end = number + 1
        self._texts.append(text)
        self._characters += len(text)
        while len(self._texts) > _MOST_BLOCKS or self._characters > _MOST_CHARACTERS:
            self._characters -= len(self._texts.popleft())
        return True

    def since(self, number: int) -> Iterator[tuple[int, str]]:
        """The blocks from a number on, as far as they are here."""
        start = self.start
        return ((start + i, text) for i, text in enumerate(self._texts) if start + i >= number)
