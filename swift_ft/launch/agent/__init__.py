"""The agent of a machine: its loop over orders and events, its guests, its status and its recordings."""
