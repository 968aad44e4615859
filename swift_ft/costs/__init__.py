"""Costs of a running training: schedule orders, layers, links, stragglers. Pure, but for the files."""
