"""Moves between two layouts: placement, sources, and the plan."""
