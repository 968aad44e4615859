"""Measurements of a worker's iterations, and their way into the store."""
