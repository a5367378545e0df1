"""The CPU: kernels as LLVM IR, compiled in this process."""
