"""The user's own script: where it is, and what it must not do."""
