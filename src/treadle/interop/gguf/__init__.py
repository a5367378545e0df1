"""GGUF files: their blocks of few bits, to read and to write."""
