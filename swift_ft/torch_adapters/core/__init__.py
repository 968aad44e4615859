"""What torch keeps to itself about tensors and optimizers of one process. Needs nothing else of swift_ft."""
