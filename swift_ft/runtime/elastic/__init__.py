"""Layers of a LayerStack, and microbatches, go to other machines."""
