"""Reads a document's fenced blocks: files to write, commands to run, and what they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"(?P<skip><!-- not run[^>]*-->\n)?```(?P<info>\w+[^\n]*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: the first word after the fence.
        attributes: such as ``title``.
        text: what stands in it.
        line: where it begins, counted from 1.
        skipped: a comment before it says that it is not run.
    """

    language: str
    attributes: dict[str, str]
    text: str
    line: int
    skipped: bool


def blocks_of(document: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    text = document.read_text()
    return [
        Block(
            language=match["info"].split()[0],
            attributes=dict(_ATTRIBUTE.findall(match["info"])),
            text=match["text"],
            line=text.count("\n", 0, match.start("info")) + 1,
            skipped=match["skip"] is not None,
        )
        for match in _FENCE.finditer(text)
    ]


def pattern_of(line: str, *, any_number: bool = False) -> re.Pattern[str]:
    """What a printed line has to match.

    Args:
        line: as it stands in the document. Three dots stand for anything.
        any_number: every number is an example. Otherwise only those with a point are, such as times and
            losses, which differ from machine to machine.
    """
    number = r"\d+(?:\.\d+)?" if any_number else r"\d+\.\d+"
    pieces = re.split(rf"({number}|\.\.\.)", line)  # every second one is free
    free = {"...": ".*"}
    return re.compile(
        "".join(
            free.get(piece, r"\d+(?:\.\d+)?") if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)
        )
    )
