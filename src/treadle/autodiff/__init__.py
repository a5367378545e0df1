"""Reverse mode on graphs, one rule per op, written with ops; and the transformations made of it."""
