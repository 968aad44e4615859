"""``python -m swift_ft.cli.recover``."""

import sys

from swift_ft.cli.recover.main import main

sys.exit(main())
