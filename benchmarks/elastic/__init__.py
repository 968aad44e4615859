"""What a change of the layout costs, and what it brings."""
