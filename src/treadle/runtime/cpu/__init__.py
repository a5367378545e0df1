"""Native programs on the processor: machine code, threads, and what a program is called with."""
