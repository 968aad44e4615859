"""Schedulers of a cluster: they are asked for machines, and get back those that have left."""
