"""Random programs on a device against the oracle; what fails is made small and printed."""
