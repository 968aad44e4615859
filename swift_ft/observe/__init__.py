"""What a process says of itself: its waits, and the spans of its recoveries."""
