"""Kernels of ops that are not computed where they are read: windows, scatters, random bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import indexing, linear, reductions
from treadle.kernel.bindings import Whole
from treadle.kernel.index import Index, Var, bounded, constant, data, divide, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Convert,
    Guarded,
    Kernel,
    Let,
    Literal,
    Local,
    Position,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.scatter import is_scatter
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    accumulated,
    along,
    apply,
    as_dtype,
    axis_vars,
    compare,
    flat_index,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site
from treadle.schedule.ordering import is_same
from treadle.schedule.segments import has_runs, run_sums


@ROOTS(reductions.ARGMAX, reductions.ARGMIN)
def _arg(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """The first best: a later one must be better; NaN is better than all but NaN."""
    axis, value = attributes_of(node).axis, TensorValue(position)
    source = lowering.graph.type_of(node.operands[0])
    every = axis_vars("i", source.shape)
    reader = lowering.reader()
    element = reader.at(node.operands[0], along(every))
    others = [v for i, v in enumerate(every) if i != axis]
    best, here, combined = (Local(n, source.dtype) for n in ("best", "here", "combined"))
    at, here_at = Local("at", dtypes.int32), Position(variable(every[axis]), dtypes.int32)
    op = "max" if node.op is reductions.ARGMAX else "min"
    # max and min keep NaN; whatever changes the best is a new best.
    is_first = Within(variable(every[axis]), 0, 1)
    takes = compare("or", compare("not", is_same(combined, best)), is_first)
    inner: list[Statement] = [
        *reader.lets,
        Let("here", element),
        Let("combined", apply(op, best, here)),
        Set("at", apply("where", takes, here_at, at)),
        Set("best", apply("where", is_first, here, combined)),
    ]
    loops = [v for v in lowering.in_memory_order(node.operands[0], every) if v is not every[axis]]
    body: list[Statement] = [
        Let("best", Literal(0, source.dtype)),
        Let("at", Literal(0, dtypes.int32)),
        *in_order([every[axis]], inner),
        lowering.store(value, along(others), at),
    ]
    return [lowering.kernel(position, reader, [value], parallel(loops, body))]


@ROOTS(reductions.CUMSUM)
def _cumsum(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    attributes: reductions.Cumulate = attributes_of(node)
    value, axis = TensorValue(position), attributes.axis
    source = lowering.graph.type_of(node.operands[0])
    every = axis_vars("i", source.shape)
    indices = [*along(every)]
    if attributes.reverse:
        indices[axis] = constant(source.shape[axis] - 1) - indices[axis]
    reader = lowering.reader()
    element = reader.at(node.operands[0], tuple(indices))
    wide, mapping = accumulator(source.dtype), lowering.target.mapping
    is_shared = mapping is not None and mapping.scans
    result = as_dtype(Local("acc", wide), source.dtype)
    inner = [
        *reader.lets,
        Accumulate("acc", "add", as_dtype(element, wide), is_shared),
        lowering.store(value, indices, result),
    ]
    body = [Let("acc", Literal(0, wide)), *in_order([every[axis]], inner)]
    others = [v for i, v in enumerate(every) if i != axis]
    return [lowering.kernel(position, reader, [value], parallel(others, body))]


@ROOTS(linear.UNWINDOW)
def _unwindow(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Each element collects the windows it lies in.

    On a processor, elements as far apart as windows are collect alike: each remainder along the
    axis that lies last has a loop of its own, in which neighbours read neighbours.
    """
    attributes: linear.Unwindow = attributes_of(node)
    window, value = attributes.window, TensorValue(position)
    every, reader = axis_vars("i", attributes.shape), lowering.reader()
    *others, last = lowering.in_memory_order(value, every)
    phases = _phases(lowering, window, every.index(last))
    loops: list[Statement] = []
    for phase in range(min(phases, last.extent)):
        count = -(-(last.extent - phase) // phases)
        suffix = f"_{phase}" if phases > 1 else ""
        var = Var(last.name + suffix, count)
        place = variable(var) * phases + phase
        at = [place if v is last else variable(v) for v in every]
        body = _collected(lowering, reader, position, node, at, "acc" + suffix)
        loops += parallel([var], body)
    return [lowering.kernel(position, reader, [value], parallel(others, loops))]


def _phases(lowering: Lowering, window: linear.Window, last: int) -> int:
    """How many loops one along an axis becomes: as many as windows are apart, where lanes gain."""
    target = lowering.target
    if target.is_spmd or last not in window.axes or any(d > 1 for d in window.dilations):
        return 1
    stride = window.strides[window.axes.index(last)]
    return stride if stride <= target.fusion.most_phases else 1


def _collected(
    lowering: Lowering, reader: Reader, position: int, node: Node, at: list[Index], name: str
) -> list[Statement]:
    """An element as the sum of the windows around it."""
    attributes: linear.Unwindow = attributes_of(node)
    window, shape = attributes.window, attributes.shape
    starts, guards = list(at), list[Within]()
    is_strided = lowering.target.is_spmd or any(n > 1 for n in window.strides)
    if is_strided and all(d == 1 for d in window.dilations):
        offsets, inner = _windows_around(window, shape, starts, guards)
    else:
        offsets = axis_vars("k", window.sizes)
        inner = _every_window(window, shape, starts, guards, offsets)
    dtype = lowering.graph.type_of(node.operands[0]).dtype
    zero, wide, value = Literal(0, dtype), accumulator(dtype), TensorValue(position)
    if not all(v.extent for v in offsets):  # between windows
        return [lowering.store(value, at, zero)]
    reader.lets = []
    indices = (*starts, *inner)
    element = reader.under(guards, lambda: reader.at(node.operands[0], indices), zero)
    body = accumulated("add", wide, offsets, reader.lets, element, name)
    return [*body, lowering.store(value, at, as_dtype(Local(name, wide), dtype))]


def _every_window(
    window: linear.Window,
    shape: Sequence[int],
    starts: list[Index],
    guards: list[Within],
    offsets: Sequence[Var],
) -> list[Index]:
    """Each element of a window, if some window has the element there: `starts` become windows."""
    counts = window.starts(tuple(shape))
    for i, axis in enumerate(window.axes):
        moved = starts[axis] - variable(offsets[i]) * window.dilations[i]
        reach = (counts[i] - 1) * window.strides[i] + 1
        guards.append(Within(moved, 0, reach))
        quotient, rest = divide(bounded(moved, reach), window.strides[i])
        if window.strides[i] > 1:
            guards.append(Within(rest, 0, 1))
        starts[axis] = quotient
    return [*along(offsets)]


def _windows_around(
    window: linear.Window, shape: Sequence[int], starts: list[Index], guards: list[Within]
) -> tuple[tuple[Var, ...], list[Index]]:
    """The few windows that can have the element, the last to begin before it first."""
    counts, found, around = window.starts(tuple(shape)), list[Index](), list[Var]()
    strides, sizes = window.strides, window.sizes
    for i, axis in enumerate(window.axes):
        quotient, rest = divide(starts[axis], strides[i])
        around.append(Var(f"k{i}", -(-max(0, sizes[i] - rest.range[0]) // strides[i])))
        start = quotient - variable(around[i])
        guards.append(Within(start, 0, counts[i]))
        offset = rest + variable(around[i]) * strides[i]
        if offset.range[1] >= sizes[i]:
            guards.append(Within(offset, 0, sizes[i]))
        starts[axis] = bounded(start, counts[i])
        found.append(bounded(offset, sizes[i]))
    return tuple(around), found


@ROOTS(indexing.SCATTER_ADD)
def _scatter_add(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Zeros, then the updates in order; axes beside the scattered one run in parallel.

    Narrow floats are summed in float32 and rounded at the end.
    """
    if lowering.target.is_spmd and has_runs(lowering.graph, node):
        return run_sums(lowering, position, node)
    attributes: indexing.ScatterAdd = attributes_of(node)
    value, axis, batch = TensorValue(position), attributes.axis, attributes.batch
    result, wide = node.types[0], accumulator(node.types[0].dtype)
    sums = lowering.buffer(value)
    is_rounded = sums.dtype is not wide
    if is_rounded:
        sums = Site(lowering, position).memory("sums", wide, result.size, Whole())
    updates, indices = (lowering.graph.type_of(v) for v in node.operands)
    chosen = indices.rank - batch
    every = axis_vars("i", updates.shape)
    own = along(every)
    reader = lowering.reader()
    index = reader.at(node.operands[1], (*own[:batch], *own[axis : axis + chosen]))
    element = as_dtype(reader.at(node.operands[0], own), wide)
    at = Local("at", dtypes.int64)
    low, high = (Literal(n, at.dtype) for n in (0, attributes.size))
    inside = compare("and", compare("le", low, at), compare("lt", at, high))
    held = Guarded(inside, element, Literal(0, wide), wide)
    chosen_at = data("at", attributes.size)
    target = lowering.address(value, [*own[:axis], chosen_at, *own[axis + chosen :]])
    update = Update(sums.name, target, held)
    body: list[Statement] = [*reader.lets, Let("at", Convert(index, dtypes.int64)), update]
    if lowering.target.adds_together(result.dtype):
        together = replace(update, shared=True)
        loops = lowering.in_memory_order(node.operands[0], every)
        found = [_cleared(lowering, position, sums)]
        if attributes.size and updates.size:
            added = parallel(loops, [*body[:-1], together])
            found.append(lowering.kernel(position, reader, [], added, "", (sums,)))
        return [*found, _rounded(lowering, position, sums)] if is_rounded else found
    free = [*every[:axis], *every[axis + chosen :]]
    added = in_order(every[axis : axis + chosen], body)
    if lowering.target.is_spmd and attributes.size > 1:
        row = Var("row", attributes.size)
        cleared = lowering.address(value, [*own[:axis], variable(row), *own[axis + chosen :]])
        zeros = in_order([row], [Store(sums.name, cleared, Literal(0, wide))])
        whole = parallel(free, [*zeros, *added])
        kernel = lowering.kernel(position, reader, [], whole, "", (sums,))
        if is_scatter(kernel, lowering.target.mapping):
            return [kernel, _rounded(lowering, position, sums)] if is_rounded else [kernel]
    scattered = parallel(free, added)
    found = [_cleared(lowering, position, sums)]
    if attributes.size:
        found.append(lowering.kernel(position, reader, [], scattered, "", (sums,)))
    return [*found, _rounded(lowering, position, sums)] if is_rounded else found


def _cleared(lowering: Lowering, position: int, sums: Buffer) -> Kernel:
    """Zeros, to which others add."""
    axes = axis_vars("i", lowering.graph.nodes[position].types[0].shape)
    fill = parallel(axes, [Store(sums.name, flat_index(axes), Literal(0, sums.dtype))])
    return lowering.kernel(position, lowering.reader(), [], fill, "_zero", (sums,))


def _rounded(lowering: Lowering, position: int, sums: Buffer) -> Kernel:
    """Sums in the dtype of the result."""
    axes = axis_vars("i", lowering.graph.nodes[position].types[0].shape)
    return Site(lowering, position).moved(sums, axes, axes, "_rounded")


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@ROOTS(indexing.RANDOM_BITS)
def _random_bits(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Philox4x32-10: four words a block, each round in named locals."""
    attributes: indexing.RandomBits = attributes_of(node)
    value, size = TensorValue(position), node.types[0].size
    block = Var("block", (size + 3) // 4)
    reader = lowering.reader()
    key = [reader.at(node.operands[0], (constant(i),)) for i in range(indexing.KEY_WORDS)]
    body = [*reader.lets, *_philox(key, block, attributes)]
    for word in range(4):
        at = variable(block) * 4 + word
        if at.range[0] >= size:  # of fewer than four elements
            break
        is_inside = at.range[1] < size
        guard = None if is_inside else Within(at, 0, size)
        element = Local(f"c{word}_{_ROUNDS}", dtypes.uint32)
        body.append(Store(lowering.names[value], bounded(at, size), element, guard))
    loops = parallel([block], body) if size else ()
    return [lowering.kernel(position, reader, [value], loops)]


def _philox(key: Sequence[Value], block: Var, attributes: indexing.RandomBits) -> list[Statement]:
    u32 = dtypes.uint32

    def word(value: int) -> Value:
        return Literal(value, u32)

    own_site = apply("and", apply("add", key[5], word(attributes.site)), word(0xFFFF))
    last = apply("add", apply("mul", key[3], word(1 << 16)), own_site)
    first: Value = Position(variable(block), u32)
    if attributes.blocks:  # a shard's, whose number is the upper half of the word
        shard = apply("mulhi", key[5], word(1 << 16))
        first = apply("add", first, apply("mul", shard, word(attributes.blocks)))
    counters = [first, key[4], key[2], last]
    found: list[Statement] = [Let(f"c{i}_0", c) for i, c in enumerate(counters)]
    for done in range(_ROUNDS):
        c = [Local(f"c{i}_{done}", u32) for i in range(4)]
        k = [apply("add", key[i], word(done * _WEYL[i] % 2**32)) for i in range(2)]
        high = [apply("mulhi", c[2 * i], word(_MULTIPLIERS[i])) for i in range(2)]
        low = [apply("mul", c[2 * i], word(_MULTIPLIERS[i])) for i in range(2)]
        new = [
            apply("xor", apply("xor", high[1], c[1]), k[0]),
            low[1],
            apply("xor", apply("xor", high[0], c[3]), k[1]),
            low[0],
        ]
        found += [Let(f"c{i}_{done + 1}", v) for i, v in enumerate(new)]
    return found
