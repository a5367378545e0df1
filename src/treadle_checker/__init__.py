"""A checker of Treadle's certificates that imports nothing of the compiler: NumPy and Python only.

reading.py      bounded readers of what a file says
field.py        the numbers that formulas are compared with; residues.py: their arithmetic
index.py        sums of variables, quotients and remainders: where something is read or written
types.py        what graphs are made of, and the types that ops give; graph.py: graphs from records
elements.py     values of a graph at some elements, or at all; scans.py; adjoints.py: transposes
forms.py, building.py, formulas.py   graphs that the checker makes itself
draws.py        whether two formulas agree; equality.py: that two graphs are equal, by lemmas
reverse.py      the gradients of a graph; derivatives.py: of elementwise ops
updates.py      the step that gradients become; optimizers.py: seven definitions
relations.py    what the graph after a stage must be
chain.py        that a program comes from what was traced
program.py      programs from records; layouts.py: what their buffers hold
bounds.py, races.py, memory.py    what holds for all iterations
sites.py        which claims a program makes
machine.py, kernel_checks.py      kernels run over the field, and compared with the graph
certificate.py  the file, its hashes, its signature, and everything that is checked
"""
