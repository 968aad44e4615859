"""Faults that tests inject: what fails when, and the places in a worker's life where it can."""

from swift_ft.faults.fault import (
    Action,
    Fault,
    Point,
    Target,
    check_faults,
    fail_at,
    missed_faults,
    parse_faults,
)

__all__ = ["Action", "Fault", "Point", "Target", "check_faults", "fail_at", "missed_faults", "parse_faults"]
