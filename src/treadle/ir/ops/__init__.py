"""The rows of the op table, one file per family."""
