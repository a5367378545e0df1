"""Around the step: accumulation on the host, checkpoints."""
