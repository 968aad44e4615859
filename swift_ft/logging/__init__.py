"""The log of messages: its format, its writer, and its reader.

These are the names that other packages use. ``format/`` defines the log byte by byte (docs/log-format.md),
``writing/`` writes a worker's messages to the store, ``reading/`` provides them to a replay.
"""

from swift_ft.logging.format.record import THROUGH_PIPELINE, Direction, MessageKey, checksum_of, copy_into
from swift_ft.logging.format.segment import SegmentIdentity, parse_segment_name, read_segment
from swift_ft.logging.options import Compress, LogBudget, LogOptions, Ship
from swift_ft.logging.reading.reader import LogReader
from swift_ft.logging.reading.segment_provider import FetchStats, PeerLog, PeerSources, SegmentSource
from swift_ft.logging.stats import IterationStats, LogStats, LogWriterMetrics
from swift_ft.logging.writing.codec_policy import CodecPolicy
from swift_ft.logging.writing.message_log import MessageLog
from swift_ft.logging.writing.uploader import LogTimeoutError, SegmentUploader
from swift_ft.logging.writing.writer import LogWriter

__all__ = [
    "THROUGH_PIPELINE",
    "CodecPolicy",
    "Compress",
    "Direction",
    "FetchStats",
    "IterationStats",
    "LogBudget",
    "LogOptions",
    "LogReader",
    "LogStats",
    "LogTimeoutError",
    "LogWriter",
    "LogWriterMetrics",
    "MessageKey",
    "MessageLog",
    "PeerLog",
    "PeerSources",
    "SegmentIdentity",
    "SegmentSource",
    "SegmentUploader",
    "Ship",
    "checksum_of",
    "copy_into",
    "parse_segment_name",
    "read_segment",
]
