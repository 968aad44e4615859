"""The log of messages: what is kept, how it is written, and how a replay reads it."""

from swift_ft.logging.choice import CodecChoice
from swift_ft.logging.codec import Codec, codec_for, pack, unpack
from swift_ft.logging.ledger import Account, Ledger
from swift_ft.logging.message_log import MessageLog
from swift_ft.logging.options import Compress, LogBudget, LogOptions, Ship
from swift_ft.logging.peers import Peer, SegmentServer
from swift_ft.logging.reader import LogReader
from swift_ft.logging.record import (
    Direction,
    Kind,
    MessageKey,
    Record,
    checksum_of,
    copy_into,
    dtype_name,
    tensor_bytes,
    verify,
)
from swift_ft.logging.segment import (
    FORMAT_VERSION,
    SegmentIdentity,
    SegmentName,
    SegmentWriter,
    format_segment_name,
    parse_segment_name,
    read_segment,
)
from swift_ft.logging.shipping import LogTimeoutError, Shipper
from swift_ft.logging.sources import Fetched, Offer, Peers
from swift_ft.logging.store import PendingFile, Store
from swift_ft.logging.writer import LogWriter, LogWriterMetrics

__all__ = [
    "FORMAT_VERSION",
    "Account",
    "Codec",
    "CodecChoice",
    "Compress",
    "Direction",
    "Fetched",
    "Kind",
    "Ledger",
    "LogBudget",
    "LogOptions",
    "LogReader",
    "LogTimeoutError",
    "LogWriter",
    "LogWriterMetrics",
    "MessageKey",
    "MessageLog",
    "Offer",
    "Peer",
    "Peers",
    "PendingFile",
    "Record",
    "SegmentIdentity",
    "SegmentName",
    "SegmentServer",
    "SegmentWriter",
    "Ship",
    "Shipper",
    "Store",
    "checksum_of",
    "codec_for",
    "copy_into",
    "dtype_name",
    "format_segment_name",
    "pack",
    "parse_segment_name",
    "read_segment",
    "tensor_bytes",
    "unpack",
    "verify",
]
