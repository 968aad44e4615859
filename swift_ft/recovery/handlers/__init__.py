"""What each event changes: functions from a state and an event to the next state. Pure."""
