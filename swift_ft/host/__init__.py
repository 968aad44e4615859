"""What this host gives to a process: memory and timers."""
