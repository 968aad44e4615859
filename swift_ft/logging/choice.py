"""Which codec pays, as measured while training runs."""

from __future__ import annotations

from collections import deque
from statistics import median

from swift_ft.logging.codec import Codec, codec_for
from swift_ft.logging.options import Compress

__all__ = ["CodecChoice"]

_SHIPMENTS = 8  # of which the median counts, so that one hiccup of the network changes nothing


class CodecChoice:
    """Chooses the codec of each message. Every segment says how its records are packed, so it may change.

    A local disk is not measured: the page cache takes more than a core packs.

    Args:
        compress: ``auto`` packs while the store takes fewer bytes a second than a core packs.
    """

    def __init__(self, compress: Compress = Compress.NEVER) -> None:
        self._compress = compress
        self._shipped: deque[float] = deque(maxlen=_SHIPMENTS)  # bytes per second
        self._packed: deque[float] = deque(maxlen=_SHIPMENTS)

    @property
    def store_bytes_per_s(self) -> float | None:
        """What the store takes; None before anything was shipped."""
        return median(self._shipped) if self._shipped else None

    @property
    def packing(self) -> bool:
        """Whether messages are packed now."""
        if self._compress is not Compress.AUTO:
            return self._compress is Compress.ALWAYS
        if not self._shipped:
            return False
        # The first message after the first shipment is packed to see how fast that goes.
        return not self._packed or median(self._shipped) < median(self._packed)

    def codec(self, dtype: str) -> Codec:
        """For a message of this dtype (:func:`swift_ft.logging.codec.codec_for`)."""
        return codec_for(dtype) if self.packing else Codec.NONE

    def shipped(self, size: int, seconds: float) -> None:
        """The store took a segment."""
        self._shipped.append(size / max(seconds, 1e-9))

    def packed(self, size: int, seconds: float) -> None:
        """A payload of ``size`` bytes was packed."""
        self._packed.append(size / max(seconds, 1e-9))
