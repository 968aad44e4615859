"""Handlers: one function for each event, from a state and the event to the next state. Pure."""
