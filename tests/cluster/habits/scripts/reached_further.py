"""A file that the script itself does not import."""

calls = 0


def growing() -> int:
    """How often it was called: in a global of this file."""
    global calls
    calls += 1
    return calls
