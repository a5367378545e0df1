"""The loop IR: kernels of loops over buffers, and programs of kernels."""
