"""WebGPU as a backend."""
