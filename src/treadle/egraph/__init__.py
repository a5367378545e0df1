"""Rewriting whole steps by rules that are data: an e-graph, its proofs, and what it costs."""
