"""The processes of a run on this host, from their start to their end.

``cluster.py`` is a whole cluster on one host, and ``machine.py`` puts one machine together: its ``agent/``,
the ``processes/`` that run the script, the ``rendezvous/`` with other machines, the ``detection/`` of losses.
"""
