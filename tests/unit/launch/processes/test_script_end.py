"""What the end of a script says of files that cannot be closed."""

from __future__ import annotations

import io
from typing import Any

import pytest

from swift_ft.launch.processes import script_end


class HalfOpened(io.IOBase):
    """As a file of fsspec before it is open: it says that it is writable."""

    f: Any = None

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if self.f != "closed":
            self.f.close()


class Full(HalfOpened):
    """What it has to write is lost."""

    def close(self) -> None:
        if self.f != "closed":
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "said"), [(HalfOpened, False), (Full, True)])
def test_what_is_lost_is_said(kind: type[HalfOpened], said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = kind()
    script_end._try(file, "close")
    assert (f"Exception ignored in: {kind.__qualname__}.close" in capsys.readouterr().err) == said
    file.f = "closed"  # its destructor closes it once more
