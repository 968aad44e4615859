"""Workers, links and iterations that are slower than the others."""
