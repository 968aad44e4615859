"""A step as a transaction: what it may change is noted at its beginning, compared, and put back."""
