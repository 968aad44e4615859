"""The rendezvous of machines: the store, its secret, the comparison of setups, and the slots."""
