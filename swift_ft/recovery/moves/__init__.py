"""What has to move from one layout to another: placement, sources, and the plan."""
