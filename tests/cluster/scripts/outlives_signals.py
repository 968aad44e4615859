"""The example training, which does not end when it is asked to. For ``slow_until_told.py`` (EXAMPLE)."""

import signal

from train_swift import main as main

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
