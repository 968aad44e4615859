"""One measured figure: a number with its range, unit and precision, as text and as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_UNIT = r"(?: ?(?P<unit>%|x|s|ms|B|kB|MB|GB|MiB|GiB|bytes|MB/s|GB/s))?"
_MEASURED = re.compile(rf"(?P<value>{_NUMBER}){_UNIT}(?: \((?P<low>{_NUMBER})-(?P<high>{_NUMBER})\))?")
_RANGE = re.compile(rf"(?P<low>{_NUMBER})-(?P<high>{_NUMBER}){_UNIT}")
_KEYS = {"value", "low", "high", "unit", "digits"}


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured: a value, a value and its range, or a range alone.

    Attributes:
        value: the value, the median if it was measured several times; None if only the range is known.
        low: the least that was measured; None without a range.
        high: the most that was measured; None without a range.
        unit: ``s``, ``MB``, ``%``, ``x`` (times); empty for a plain number.
        digits: digits after the point, so that 1.10 does not become 1.1.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    digits: int = 0

    @classmethod
    def from_text(cls, text: str) -> Figure | None:
        """Reads ``0.512 s (0.498-0.530)``, ``1,024`` or ``0.01-0.03 s``; None if it is something else."""
        match = _MEASURED.fullmatch(text) or _RANGE.fullmatch(text)
        if match is None:
            return None
        found = match.groupdict()
        numbers = [found.get(name) for name in ("value", "low", "high")]
        digits = {len(number.partition(".")[2]) for number in numbers if number}
        if len(digits) != 1:
            return None
        value, low, high = (_number(number) if number else None for number in numbers)
        return cls(value, low, high, found["unit"] or "", digits.pop())

    def text(self) -> str:
        """``0.512 s (0.498-0.530)``."""
        unit = self.unit if self.unit == "x" else f" {self.unit}".rstrip()
        spread = (
            "" if self.low is None or self.high is None else f"{self._said(self.low)}-{self._said(self.high)}"
        )
        if self.value is None:
            return f"{spread}{unit}"
        return f"{self._said(self.value)}{unit}" + (f" ({spread})" if spread else "")

    def __format__(self, spec: str) -> str:
        """The value alone, without its unit: ``{figure:.1f}``. All of it without a format."""
        return format(self.value, spec) if spec else self.text()

    def _said(self, number: float) -> str:
        return f"{number:,.{self.digits}f}" if self.digits == 0 else f"{number:.{self.digits}f}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary without what is empty, and without digits that the numbers show."""
        found = {
            name: getattr(self, name)
            for name in ("value", "low", "high", "unit")
            if getattr(self, name) not in (None, "")
        }
        shown = max(_decimals(number) for number in (self.value, self.low, self.high) if number is not None)
        return found if shown == self.digits else found | {"digits": self.digits}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Figure:
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError: if it is not a figure; the message names it.
        """
        value, low, high = (data.get(name) for name in ("value", "low", "high"))
        known = [number for number in (value, low, high) if number is not None]
        if (
            data.keys() - _KEYS
            or not known
            or not all(isinstance(number, int | float) for number in known)
            or (low is None) != (high is None)
        ):
            raise ValueError(f"not a figure: {data}")
        digits = data.get("digits", max(map(_decimals, known)))
        return cls(value, low, high, data.get("unit", ""), digits)


Cell: TypeAlias = Figure | str | None
"""What stands in a table: a figure, words, or nothing."""


def cell_from_text(text: str) -> Cell:
    """A figure where the text is one; None where it is empty."""
    return Figure.from_text(text) or text or None


def cell_text(cell: Cell) -> str:
    """A cell as it is printed."""
    return cell.text() if isinstance(cell, Figure) else cell or ""


def cell_to_json(cell: Cell) -> dict[str, Any] | str | None:
    """A cell as JSON has it."""
    return cell.to_json() if isinstance(cell, Figure) else cell


def cell_from_json(data: dict[str, Any] | str | None) -> Cell:
    """A cell from JSON.

    Raises:
        ValueError: if it is neither a figure, nor words, nor null.
    """
    if isinstance(data, dict):
        return Figure.from_json(data)
    if data is not None and not isinstance(data, str):
        raise ValueError(f"not a cell: {data!r}; write words, null, or a figure with its value and unit")
    return data


def _number(text: str) -> float:
    plain = text.replace(",", "")
    return float(plain) if "." in plain else int(plain)


def _decimals(number: float) -> int:
    """Digits after the point that the number itself shows: 2 for 0.25, none for 3 and 3.0."""
    if number == int(number):
        return 0
    exponent = Decimal(str(number)).as_tuple().exponent
    return -int(exponent)
