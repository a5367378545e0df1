"""Graphs to programs: what is computed where, in which loops."""
