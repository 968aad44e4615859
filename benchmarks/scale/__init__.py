"""How the control plane grows with the job: measured up to 1,024 machines, simulated beyond."""
