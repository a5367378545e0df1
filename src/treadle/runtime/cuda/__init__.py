"""NVIDIA GPUs: memory, compiled kernels, library products, and the step as one graph."""
