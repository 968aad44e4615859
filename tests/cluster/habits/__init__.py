"""Habits of scripts: what people write in a step or around it, each beside an undisturbed run."""
