"""The table of docs/support.md, from the cases that the tests run.

``python -m docs.support`` writes it anew; with ``--check`` it fails if the page is old.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from docs.generated import write_or_check
from docs.house import ROOT
from tests.support.support_table import CASES, FEATURES, PARALLELISMS, Case

PATH = ROOT / "docs" / "support.md"

_BEGIN, _END = "<!-- begin table -->\n", "<!-- end table -->\n"


def document(text: str) -> str:
    """The page with the table that the cases give.

    Raises:
        LookupError: if the page has no place for it.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise LookupError(f"{PATH} has no place for the table")
    return "\n".join([f"{before}{begin}", *_lines(), "", f"{end}{after}"])


def _lines() -> Iterator[str]:
    names = [name for name in PARALLELISMS if any(case.parallelism == name for case in CASES)]
    cases = {(case.feature, case.parallelism): case for case in CASES}
    notes: dict[str, int] = {}
    yield f"| | {' | '.join(names)} |"
    yield f"| --- |{' --- |' * len(names)}"
    for feature in dict.fromkeys(case.feature for case in CASES):
        cells = (_cell(cases.get((feature, name)), notes) for name in names)
        yield f"| {_in_words(feature)} | {' | '.join(cells)} |"
    yield ""
    for note, number in notes.items():
        yield f"{number}. {note}"


def _in_words(feature: str) -> str:
    if feature in FEATURES:
        return FEATURES[feature]
    return f"several at once: {', '.join(feature.split('+'))}"


def _cell(case: Case | None, notes: dict[str, int]) -> str:
    if case is None:
        return "not tried"
    word = "not in torch" if case.impossible else "refused" if case.refused else "works"
    note = case.note or case.impossible or (f"The line says: “{case.refused}”." if case.refused else "")
    return f"{word} ({notes.setdefault(note, len(notes) + 1)})" if note else word


if __name__ == "__main__":
    sys.exit(write_or_check("docs.support", __doc__, lambda: {PATH: document(PATH.read_text())}))
