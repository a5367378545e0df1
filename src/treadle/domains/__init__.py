"""One graph, many number systems: float64 (the oracle), dual numbers, finite fields, graphs."""
