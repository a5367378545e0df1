"""Where temporary buffers lie: lifetimes to one arena."""
