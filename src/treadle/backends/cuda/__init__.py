"""NVIDIA GPUs: kernels as CUDA C++, a step as one captured graph."""
