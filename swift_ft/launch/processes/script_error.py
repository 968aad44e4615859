"""An exception that a script has ended with: whose fault it is, and the line of the user's program."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from swift_ft.program.own_code import is_own_file
from swift_ft.program.secrets import without_secrets
from swift_ft.recovery.causes import Cause, cause_of_error
from swift_ft.torch_adapters.bad_samples import bad_sample
from swift_ft.torch_adapters.comm_errors import is_broken_communication


def whose_fault(error: BaseException) -> dict[str, Any]:
    """The facts that a worker sends of it.

    Returns:
        ``failed``, the error as the last line of its traceback says it, in whatever process that was; its
        ``cause``; and ``at`` which place of the program it came.
    """
    cause = cause_of_error([one.__name__ for one in type(error).__mro__], str(error))
    if cause == Cause.SCRIPT and is_broken_communication(error):
        cause = Cause.NETWORK
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_own_file(frame.filename)]
    where = [f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}" for frame in theirs[-1:]]
    sample = bad_sample(error)
    if cause in (Cause.SCRIPT, Cause.NETWORK) and sample is not None:
        cause = Cause.DATA if cause == Cause.SCRIPT else cause
        where = [*([sample.place] if sample.place else where), sample.words]
    told = sample.error if sample is not None else ""
    failed = without_secrets(told or f"{type(error).__name__}: {error}")  # a secret that is cut is not known
    return {"failed": failed[:2000], "cause": cause.value, "at": where}
