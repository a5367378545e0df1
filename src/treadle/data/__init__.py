"""Data that comes with the package. README.md beside it records sources and licences."""
