"""What a picture says."""

from __future__ import annotations

import re
from pathlib import Path


def texts_of(picture: Path) -> set[str]:
    """The texts of an SVG drawing, which matplotlib keeps as comments beside the letters' paths."""
    return {text.strip() for text in re.findall(r"<!-- (.*?) -->", picture.read_text())}
