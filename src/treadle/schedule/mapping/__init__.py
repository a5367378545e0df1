"""Kernels to a GPU's grid, blocks, warps and lanes: who runs which iterations, in which memory."""
