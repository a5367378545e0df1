"""Kernels as CUDA C++ text, and how each is launched."""
