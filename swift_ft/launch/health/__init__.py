"""Health checks: a machine shows that it computes and stores what it should, before it takes a slot.

``facts`` is what a check is told, ``checks`` are those that ship, ``gate`` runs them in their own process.
"""
