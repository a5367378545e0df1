"""What graphs run on: a protocol, and an implementation for each device."""
