"""Where casts come from: the pass that makes a float32 graph compute in a narrower dtype."""
