"""Chooses codecs from measurements made while training runs."""

from __future__ import annotations

from collections import deque
from statistics import median

from swift_ft.logging.format.codec import Codec, codec_for
from swift_ft.logging.options import Compress

_UPLOADS = 8  # the median of the last uploads counts: one slow upload changes nothing


class CodecPolicy:
    """Chooses the codec of each message. Each record names its codec, so the choice may change.

    A local disk is not measured: the page cache takes more than a core packs.

    Args:
        compress: ``auto`` packs while the store takes fewer bytes a second than a core packs.
    """

    def __init__(self, compress: Compress = Compress.NEVER) -> None:
        self._compress = compress
        self._upload_rates: deque[float] = deque(maxlen=_UPLOADS)  # bytes per second
        self._packing_rates: deque[float] = deque(maxlen=_UPLOADS)

    @property
    def store_bytes_per_s(self) -> float | None:
        """Throughput of the store; None before the first upload."""
        return median(self._upload_rates) if self._upload_rates else None

    @property
    def packing(self) -> bool:
        """Whether messages are packed now."""
        if self._compress is not Compress.AUTO:
            return self._compress is Compress.ALWAYS
        if not self._upload_rates:
            return False
        # The first message after the first upload is packed to measure how fast packing is.
        return not self._packing_rates or median(self._upload_rates) < median(self._packing_rates)

    def codec(self, dtype: str) -> Codec:
        """For a message of this dtype (:func:`swift_ft.logging.format.codec.codec_for`)."""
        return codec_for(dtype) if self.packing else Codec.NONE

    def record_upload(self, size: int, seconds: float) -> None:
        """Records that the store took a segment of ``size`` bytes."""
        self._upload_rates.append(size / max(seconds, 1e-9))

    def record_packing(self, size: int, seconds: float) -> None:
        """Records that a payload of ``size`` bytes was packed."""
        self._packing_rates.append(size / max(seconds, 1e-9))
