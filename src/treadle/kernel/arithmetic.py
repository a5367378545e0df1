"""Facts about ops on numbers that stages share."""

from __future__ import annotations

# What a small change of an operand changes little: inside it, narrow floats need no rounding.
SMOOTH = frozenset("add sub mul div neg abs sqrt rsqrt exp log sin cos tanh erf pow".split())
