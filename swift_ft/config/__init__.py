"""The configuration of a run and of each of its workers."""
