"""The functions that a script gives to `session.between()`."""
