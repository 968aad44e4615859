"""Global checkpoints: when they are saved, committed, offered to others and deleted."""
