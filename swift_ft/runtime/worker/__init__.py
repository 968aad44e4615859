"""The core of a worker, which decides what it does, and the interface of its parts, which do it."""
