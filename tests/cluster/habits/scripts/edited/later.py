"""What the program imports only in the middle of the run."""

SCALE = 2.0
