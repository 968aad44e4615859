"""A file with the name of a part of the state."""

taken = 0


def take() -> int:
    """How often it was called: in a global of this file."""
    global taken
    taken += 1
    return taken
