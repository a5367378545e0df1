"""A checker of Treadle's certificates that imports nothing of the compiler: NumPy and Python only.

reading.py      bounded readers of what a file says
field.py        the numbers that formulas are compared with; residues.py: their arithmetic
index.py        sums of variables, quotients and remainders: where something is read or written
types.py        what graphs are made of, and the types that ops give; graph.py: graphs from records
elements.py     values of a graph at some elements, or at all; scans.py; derivatives.py: slopes
equality.py     that two graphs are equal: congruence, and cones over the field
gradient.py     forward mode against the gradients that a graph has
program.py      programs from records; layouts.py: what their buffers hold
bounds.py, races.py, memory.py    what holds for all iterations
sites.py        which claims a program makes
machine.py, kernel_checks.py      kernels run over the field, and compared with the graph
certificate.py  the file, its hashes, its signature, and everything that is checked
"""
