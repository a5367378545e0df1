"""Rewriting graphs by rules: each a name, a pattern, a condition and a builder."""
