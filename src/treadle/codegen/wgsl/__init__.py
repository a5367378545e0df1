"""WGSL text of mapped kernels, for WebGPU."""
