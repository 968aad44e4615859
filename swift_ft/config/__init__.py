"""How a run and each of its workers are configured."""
