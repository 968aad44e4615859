"""``python -m swift_ft.cli.chaos``."""

import sys

from swift_ft.cli.chaos.main import main

sys.exit(main())
