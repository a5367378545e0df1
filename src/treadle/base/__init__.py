"""What every other folder stands on: dtypes, shapes, trees, origins and errors."""
