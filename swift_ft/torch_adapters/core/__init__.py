"""Private parts of torch's tensors and optimizers in one process. Needs nothing else of swift_ft."""
