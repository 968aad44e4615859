"""``python -m swift_ft.cli.plan``."""

import sys

from swift_ft.cli.plan.main import main

sys.exit(main())
