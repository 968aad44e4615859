"""The change to another world, as its workers carry it out (`recovery/worlds.py`)."""
