"""Kernels to source text. Nothing here runs anything: it is tested without any device."""
