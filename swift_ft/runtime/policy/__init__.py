"""Asks for another world by itself, where that pays (`recovery/policy.py`)."""
