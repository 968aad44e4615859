"""Layouts for any set of machines: pure functions, so that all machines compute the same."""
