"""Compiled programs as a folder that a browser runs, and trains."""
