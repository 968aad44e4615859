"""Waits that a process announces, and the spans of its recoveries."""
