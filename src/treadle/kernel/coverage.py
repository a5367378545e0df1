"""That memory is filled: stores reach as many elements as a buffer is said to hold.

Elements are counted by loops, so that a loop that is missing is found in every compile at no cost
to speak of. It is a bound and no proof: stores that meet are counted twice, and guarded ones count
in full. Full verification compares what is stored.
"""

from __future__ import annotations

import math
from collections import Counter

from treadle.base.errors import GraphError
from treadle.ir.types import TensorType
from treadle.kernel.bindings import Copy, Partial, Whole, Work
from treadle.kernel.index import Index, data_locals, variables_in
from treadle.kernel.nodes import For, Kernel, LibraryCall, Matmul, Store
from treadle.kernel.program import Call, Program
from treadle.kernel.traverse import nested


def check_filled(program: Program) -> Program:
    """The program itself; a GraphError that names a buffer of which elements are never stored."""
    graphs, leaves = dict(program.bindings.graphs), {name for name, _ in program.leaves}
    stored, writers = _stored_by_program(program)
    times = Counter(b.buffer for b in program.bindings.every)
    for binding in program.bindings.every:
        name, content = binding.buffer, binding.content
        if name in leaves or name not in stored or times[name] > 1 or isinstance(content, Work):
            continue  # what holds several things one after the other need not be filled by each
        wanted = element_count(content, graphs[binding.scope].type_of(binding.value))
        if stored[name] < wanted:
            kernel, lines = writers[name].kernel.name, writers[name].origins
            where = f" [{lines[0]}]" if lines else ""
            told = f"kernel {kernel}: {stored[name]} of {wanted} elements of {name} are stored"
            raise GraphError("verify", told + where)
    return program


def _stored_by_program(program: Program) -> tuple[Counter[str], dict[str, Call]]:
    """Elements that all calls together store to each buffer, and the last call that does."""
    found: Counter[str] = Counter()
    writers: dict[str, Call] = {}
    known: dict[int, Counter[str]] = {}
    for call, times in program.counted_calls():
        kernel = call.kernel
        if id(kernel) not in known:
            known[id(kernel)] = stored_elements(kernel)
        for buffer, argument in zip(kernel.buffers, call.arguments, strict=True):
            if buffer.name in known[id(kernel)]:
                rows = times if argument.row else 1
                found[argument.buffer] += rows * known[id(kernel)][buffer.name]
                writers[argument.buffer] = call
    return found, writers


def stored_elements(kernel: Kernel) -> Counter[str]:
    """How many elements of each buffer are stored, at most, over all iterations."""
    found: Counter[str] = Counter()
    for s, loops in nested(kernel.body):
        match s:
            case Store(buffer, index):
                found[buffer] += _reached(index, loops)
            case Matmul(target) if not s.adds:
                inside = target.rows.count * target.columns.count
                found[target.buffer] += inside * _reached(target.index, loops)
            case LibraryCall(_, results):
                for view in results:
                    found[view.buffer] += math.prod(view.shape)
            case _:
                pass
    return found


def _reached(index: Index, loops: tuple[For, ...]) -> int:
    """Elements that an index reaches, at most: iterations of the loops that move it."""
    moves, is_data = variables_in(index), bool(data_locals(index))
    count = 1
    for loop in loops:
        if is_data or loop.var in moves:
            count *= loop.var.extent if loop.stop is None else max(0, loop.stop.range[1])
    return count


def element_count(content: Whole | Copy | Partial, type_: TensorType) -> int:
    """How many addresses a binding says something about."""
    if isinstance(content, Whole):
        return type_.size
    return math.prod(v.extent for v in content.elements.variables)
