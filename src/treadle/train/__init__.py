"""Around the step: the trainer and its callbacks, accumulation, checkpoints, loggers."""
