"""NVIDIA GPUs: memory, compiled kernels, library calls, and the step as one graph."""
