"""Memory and timers of this host."""
