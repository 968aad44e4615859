"""Exit codes with a meaning, besides the script's own."""

from __future__ import annotations

EXIT_USAGE = 2
"""Exit code for mistakes that the user can fix."""

EXIT_FENCED = 75
"""Exit code of a worker that finds that its machine has been replaced."""

EXIT_KEPT_OUT = 76
"""Exit code of a launcher whose machine takes no part in the run, which goes on with another one."""

EXIT_NOT_STARTED = 127
"""Exit code of a worker that could not begin to run its script or program, as shells have it."""
