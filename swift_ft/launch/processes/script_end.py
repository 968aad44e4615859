"""The end of a script, as in Python: threads end, exit handlers run, files are flushed.

A worker's process cannot end as an interpreter does. It was forked in the middle of another program, and its
daemon threads and torch's may be blocked in the rendezvous store: an interpreter that ends lets them run into
its ruins, and C++ aborts the process. So what the end of a script is known for is done here, in Python's
order, and the process then ends at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

_logger = logging.getLogger(__name__)

_SAID_AFTER_S = 10.0
"""A wait that is longer is told."""

_OWN = ("swift-", "swift_ft ")
"""The prefixes of the names of this package's own threads."""

_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_KEPT = frozenset({"torch", "swift_ft"})
"""Packages whose finalizers are left out: a process group's may wait for others."""


def finish(limit_s: float, on_late: Callable[[str], object]) -> None:
    """Do all that Python does between the last line of a script and the end of its process.

    Args:
        limit_s: how long that may take. A line tells of it long before.
        on_late: called in another thread with what has not ended by then; it ends the process. An empty text:
            nothing of the script's.
    """
    done = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(done, limit_s, on_late), name="swift-script-end", daemon=True
    )
    watch.start()
    # Executors end through it, too. The interpreter itself calls it by this name, and there is no other way.
    threading._shutdown()  # type: ignore[attr-defined]  # not in the stubs
    _end_of_script()
    done.set()


def _end_of_script() -> None:
    atexit._run_exitfuncs()
    _finalize(gc.get_objects())
    _flush_c()


def _watch(done: threading.Event, limit_s: float, on_late: Callable[[str], object]) -> None:
    said_s = min(_SAID_AFTER_S, limit_s / 2)
    if done.wait(said_s):
        return
    if awaited := _awaited():
        _logger.warning(
            "the script has ended, and %s has not: this process waits for it, for %g s at most "
            "(--exit-timeout)",
            awaited,
            limit_s,
            extra={"event": "script_end_waits"},
        )
    if done.wait(limit_s - said_s):
        return
    if not (awaited := _awaited()):  # the store hangs, for which the script's own files must not pay
        _logger.warning(
            "Something is still being written into the store %g s after the end of the script: it is left.",
            limit_s,
            extra={"event": "store_left"},
        )
        ending = threading.Thread(target=_end_of_script, name="swift-script-files", daemon=True)
        ending.start()
        ending.join(limit_s)
        if ending.is_alive():
            awaited = "an exit handler, or what closes a file,"
    on_late(awaited)


def _awaited() -> str:
    """The waits of the end, in words."""
    others = [thread for thread in threading.enumerate() if not thread.daemon]
    threads = [thread.name for thread in others if thread is not threading.main_thread()]
    if of_script := [name for name in threads if not name.startswith(_OWN)]:
        return f"thread {', '.join(of_script)}"
    if threads:
        return ""
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    return f"process {', '.join(children)}" if children else "an exit handler"


def _finalize(things: Iterable[Any]) -> None:
    """Let what a script leaves open write its rest: objects with a finalizer, and files.

    Args:
        things: all objects that there are. Those from before the fork are not among them.
    """
    roles: dict[type, int | None] = {}
    due: list[list[Any]] = [[], [], [], []]
    for thing in things:
        kind = type(thing)
        if kind not in roles:
            roles[kind] = _role(kind)
        if (role := roles[kind]) is not None:
            due[role].append(thing)
    for thing in due[0]:
        _try(thing, "__del__")
    for thing in due[1]:
        _try(thing, "flush")
    for thing in due[2]:
        _try(thing, "close")
    for thing in due[3]:
        _try(thing, "flush")


def _role(kind: type) -> int | None:
    """When it is the turn of objects of a type; None for never. What writes into others comes before them."""
    package = kind.__module__.partition(".")[0] if isinstance(kind.__module__, str) else ""
    if issubclass(kind, io.TextIOBase):
        return 1
    if issubclass(kind, io.RawIOBase) or package in _KEPT:
        return None
    if issubclass(kind, io.IOBase):  # a compressed file's last bytes, or an upload, come with its close
        return 3 if package in ("_io", "io") else 2
    has_finalizer = any("__del__" in base.__dict__ for base in kind.__mro__)
    return 0 if has_finalizer and package not in _STANDARD else None


def _try(thing: Any, method: str) -> None:
    try:
        if not getattr(thing, "closed", False):
            getattr(thing, method)()
    except KeyboardInterrupt:  # a signal, which is this process's and not the object's
        raise
    except BaseException as error:  # a finalizer that raises SystemExit ends nothing in Python either
        # A file without its attributes is one that another thread was about to open: it has nothing to lose.
        if isinstance(thing, io.IOBase) and (isinstance(error, AttributeError) or not _is_writable(thing)):
            return
        print(f"Exception ignored in: {type(thing).__qualname__}.{method}", file=sys.stderr)
        traceback.print_exc()


def _is_writable(file: io.IOBase) -> bool:
    with contextlib.suppress(Exception):
        return file.writable()
    return False


def _flush_c() -> None:
    """Write out what C and C++ libraries have printed, and what is still in a buffer of C's."""
    with contextlib.suppress(OSError, AttributeError):  # another platform
        ctypes.CDLL(None).fflush(None)
