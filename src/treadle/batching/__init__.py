"""The batching rule of each op, `vmap`, and `associative_scan`, which is made with it."""
