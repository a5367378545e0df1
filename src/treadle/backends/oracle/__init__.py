"""The oracle: graphs run through the float64 interpreter."""
