"""LLVM IR as text, for the CPU."""
