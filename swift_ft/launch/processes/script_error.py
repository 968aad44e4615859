"""An exception that a script has ended with: whose fault it is, and the line of the user's program."""

from __future__ import annotations

import sys
import traceback
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.program.own_code import is_class_of_runtime, is_of_program, is_of_runtime, is_own_file
from swift_ft.program.secrets import without_secrets
from swift_ft.recovery.causes import Cause, cause_of_error, names_of
from swift_ft.torch_adapters.bad_samples import BadSample, bad_sample
from swift_ft.torch_adapters.comm_errors import is_broken_communication

_DEFECTS = (AssertionError, AttributeError, LookupError, NameError, TypeError, ArithmeticError)
"""By which a defect of Python code shows itself. One of torch's in our code may be of the user's tensors."""
_OF_NO_ARGUMENT = (AssertionError, NameError)
"""Of these, the ones that no value which a script hands over can bring about."""


def whose_fault(error: BaseException) -> dict[str, Any]:
    """The facts that a worker sends of it.

    Returns:
        ``failed``, the error as the last line of its traceback says it, in whatever process that was; its
        ``cause``; and ``at`` which place of the program it came.
    """
    frames = traceback.extract_tb(error.__traceback__)
    sample = bad_sample(error)
    cause = _cause_of(error, sample)
    if cause == Cause.SCRIPT and is_broken_communication(error):
        cause = Cause.NETWORK
    elif isinstance(error, ConnectionError) and _is_in_local_pipe(frames):
        cause = Cause.SCRIPT
    theirs = [frame for frame in frames if is_own_file(frame.filename)]
    where = [f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}" for frame in theirs[-1:]]
    if cause in (Cause.SCRIPT, Cause.NETWORK, Cause.STORE) and sample is not None:
        cause = Cause.DATA if cause == Cause.SCRIPT else cause
        where = [*([sample.place] if sample.place else where), sample.words]
    elif cause == Cause.SCRIPT and theirs and _is_unmeant_in_runtime(error, frames[-1]):
        cause = Cause.SCRIPT if _may_be_of_a_value(error, frames[-2]) else Cause.RUNTIME
        where.append(f"in swift_ft, {Path(frames[-1].filename).name}:{frames[-1].lineno}")
    told = sample.error if sample is not None else ""
    failed = without_secrets(told or f"{type(error).__name__}: {error}")  # a secret that is cut is not known
    return {"failed": failed[:2000], "cause": cause.value, "at": where}


def cause_of_usage(error: UsageError) -> str:
    """The cause of an error that the user can mend; empty where that is the script, as it mostly is."""
    cause = cause_of_error(names_of(type(error)), str(error))
    return "" if cause == Cause.SCRIPT else cause.value


def _cause_of(error: BaseException, sample: BadSample | None) -> Cause:
    """By its class and text: of a loader's process by those there, of which torch may have made others."""
    if sample is None or not sample.kind:
        return cause_of_error(names_of(type(error)), str(error))
    module, _, name = sample.kind.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return cause_of_error(names_of(kind), sample.text)
    return cause_of_error([name], sample.text)


def _is_unmeant_in_runtime(error: BaseException, innermost: traceback.FrameSummary) -> bool:
    """Whether it is an error in this package's own code that nobody has raised on purpose.

    What it raises on purpose names a mistake of the script's, but for an assertion.
    """
    on_purpose = (innermost.line or "").startswith("raise ") and not isinstance(error, AssertionError)
    return isinstance(error, _DEFECTS) and is_of_runtime(innermost.filename) and not on_purpose


def _may_be_of_a_value(error: BaseException, caller: traceback.FrameSummary) -> bool:
    """Whether an error in this package's own code may come of a value or a function that the script gave it.

    A type checker knows the types of our own values. A function of the script's that takes other arguments
    than it is called with fails in the line that calls it.

    Args:
        error: was raised by no line on purpose.
        caller: the frame above the innermost one.
    """
    if isinstance(error, _OF_NO_ARGUMENT):
        return False
    if isinstance(error, TypeError) or is_of_program(caller.filename):
        return True
    return isinstance(error, AttributeError) and not _is_own_value(error.obj)


def _is_own_value(value: object) -> bool:
    """Whether a value is this package's rather than one that it was given: also nothing, and modules."""
    return value is None or isinstance(value, ModuleType) or is_class_of_runtime(type(value))


def _is_in_local_pipe(frames: traceback.StackSummary) -> bool:
    """Whether a connection to another process of the script's broke, such as that of a ``Manager``."""
    return bool(frames) and frames[-1].filename == connection.__file__
