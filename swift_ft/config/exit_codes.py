"""Exit codes with a meaning, besides the script's own."""

from __future__ import annotations

EXIT_USAGE = 2
"""Exit code for mistakes that the user can fix."""

EXIT_FENCED = 75
"""Exit code of a worker that finds that its machine has been replaced."""

EXIT_RENDEZVOUS_LOST = 76
"""Exit code of a machine of a whole cluster on one host that has lost the rendezvous store."""

EXIT_KEPT_OUT = 78
"""Exit code of a launcher whose machine takes no part in the run, which goes on with another one."""

EXIT_NOT_STARTED = 127
"""Exit code of a worker that could not begin to run its script or program, as shells have it."""
