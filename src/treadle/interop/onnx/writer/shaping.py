"""Exporters of leaves, of ops that move elements, and of reductions."""

from __future__ import annotations

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.interop.onnx.writer.sizes import Sizes, is_fixed
from treadle.interop.onnx.writer.walk import EXPORT, Exporter, Site
from treadle.ir.literal import to_numpy
from treadle.ir.op import Op
from treadle.ir.ops import leaves, reductions, shaping

INDEX_END = np.iinfo(np.int64).min + 1  # before the first element, whatever the size


@EXPORT(leaves.IOTA)
def _iota(site: Site) -> list[str]:
    attributes = site.attributes
    assert isinstance(attributes, leaves.Iota)
    axis, sizes = attributes.axis, site.result_sizes()
    nodes, dtype = site.nodes, attributes.dtype
    size = sizes[axis]
    if isinstance(size, int):
        line = nodes.constant(np.arange(size), dtype)
    else:
        line = nodes.add("Range", nodes.number(0), nodes.number(size), nodes.number(1))
        line = nodes.cast(line, dtype)
    if len(sizes) == 1:
        return [line]
    spread: Sizes = tuple(n if i == axis else 1 for i, n in enumerate(sizes[: len(sizes)]))
    return [nodes.expand(nodes.reshape(line, spread[axis:]), sizes)]


@EXPORT(shaping.RESHAPE)
def _reshape(site: Site) -> list[str]:
    return [site.nodes.reshape(site.names[0], site.result_sizes())]


@EXPORT(shaping.PERMUTE)
def _permute(site: Site) -> list[str]:
    assert isinstance(site.attributes, shaping.Permute)
    if not site.attributes.axes:  # ONNX has no empty list
        return [site.nodes.add("Identity", site.names[0])]
    return [site.nodes.add("Transpose", site.names[0], perm=site.attributes.axes)]


@EXPORT(shaping.SLICE)
def _slice(site: Site) -> list[str]:
    """The axes that are not taken whole."""
    ours, theirs = site.attributes, site.other.attributes
    assert isinstance(ours, shaping.Slice)
    assert isinstance(theirs, shaping.Slice)
    batch, starts, stops, strides, axes = site.walk.pair.batch, [], [], [], []
    for axis, n in enumerate(site.sizes(0)):
        bounds = [
            (a[axis], b[axis])
            for a, b in ((ours.starts, theirs.starts), (ours.stops, theirs.stops))
        ]
        start, stop = (batch.size(a, b) if batch else a for a, b in bounds)
        if (start, stop, ours.strides[axis]) != (0, n, 1):
            starts.append(start)
            stops.append(stop)
            strides.append(ours.strides[axis])
            axes.append(axis)
    if not axes:
        return [site.nodes.add("Identity", site.names[0])]
    bounds_ = (site.nodes.sizes(tuple(starts)), site.nodes.sizes(tuple(stops)))
    parts = (site.nodes.integers(axes), site.nodes.integers(strides))
    return [site.nodes.add("Slice", site.names[0], *bounds_, *parts)]


@EXPORT(shaping.PAD)
def _pad(site: Site) -> list[str]:
    pad = site.attributes
    assert isinstance(pad, shaping.Pad)
    nodes, name, sizes = site.nodes, site.names[0], list(site.sizes(0))
    dtype = site.types[0].dtype
    value = nodes.constant(to_numpy(pad.value, dtype.numpy))
    if any(pad.interior):
        name = _spread(site, name, sizes, value)
    if any((*pad.low, *pad.high)):
        name = _padded(site, name, [*pad.low, *pad.high], value, dtype)
    return [name if name != site.names[0] else nodes.add("Identity", name)]


def _padded(site: Site, name: str, amounts: list[int], value: str, dtype: DType) -> str:
    nodes = site.nodes
    if dtype is dtypes.bool_:  # few runtimes pad these
        wide, ints = nodes.cast(name, dtypes.int32), nodes.cast(value, dtypes.int32)
        return nodes.cast(nodes.add("Pad", wide, nodes.integers(amounts), ints), dtypes.bool_)
    return nodes.add("Pad", name, nodes.integers(amounts), value)


def _spread(site: Site, name: str, sizes: list, value: str) -> str:
    """Elements between neighbours: padding after each, and the last of it cut off."""
    pad, nodes = site.attributes, site.nodes
    assert isinstance(pad, shaping.Pad)
    for axis, amount in enumerate(pad.interior):
        if not amount or sizes[axis] == 0:
            continue
        n = site.fixed(0, axis)
        name = nodes.reshape(name, (*sizes[: axis + 1], 1, *sizes[axis + 1 :]))
        rank = len(sizes) + 1
        amounts = [0] * 2 * rank
        amounts[rank + axis + 1] = amount
        name = _padded(site, name, amounts, value, site.types[0].dtype)
        sizes[axis] = n * (amount + 1)
        name = nodes.reshape(name, tuple(sizes))
        sizes[axis] -= amount
        ends = (nodes.integers([0]), nodes.integers([sizes[axis]]), nodes.integers([axis]))
        name = nodes.add("Slice", name, *ends)
    return name


@EXPORT(shaping.CONCAT)
def _concat(site: Site) -> list[str]:
    assert isinstance(site.attributes, shaping.Concat)
    return [site.nodes.add("Concat", *site.names, axis=site.attributes.axis)]


@EXPORT(shaping.FLIP)
def _flip(site: Site) -> list[str]:
    assert isinstance(site.attributes, shaping.Flip)
    axes, integers = list(site.attributes.axes), site.nodes.integers
    back = [-1] * len(axes)
    ends = integers([INDEX_END] * len(axes))
    return [
        site.nodes.add("Slice", site.names[0], integers(back), ends, integers(axes), integers(back))
    ]


def _clamped(site: Site, starts: int, sizes: Sizes) -> str:
    """Start indices such that a part of these sizes lies inside of the first operand."""
    nodes = site.nodes
    wide = nodes.cast(site.names[starts], dtypes.int64)
    most = nodes.add("Sub", nodes.sizes(site.sizes(0)), nodes.sizes(sizes))
    return nodes.add("Max", nodes.add("Min", wide, most), nodes.integers([0]))


@EXPORT(shaping.DYNAMIC_SLICE)
def _dynamic_slice(site: Site) -> list[str]:
    nodes, sizes = site.nodes, site.result_sizes()
    if not sizes:
        return [nodes.add("Identity", site.names[0])]
    starts = _clamped(site, 1, sizes)
    ends = nodes.add("Add", starts, nodes.sizes(sizes))
    part = nodes.add("Slice", site.names[0], starts, ends, nodes.integers(range(len(sizes))))
    return [nodes.reshape(part, sizes) if is_fixed(sizes) else part]


@EXPORT(shaping.DYNAMIC_UPDATE)
def _dynamic_update(site: Site) -> list[str]:
    """`ScatterND` at a grid of indices from the start."""
    nodes, update = site.nodes, site.types[1]
    for axis in range(update.rank):
        site.fixed(1, axis)
    if not update.rank:
        return [nodes.add("Identity", site.names[1])]
    grid = np.moveaxis(np.indices(update.shape), 0, -1).astype(np.int64)
    places = nodes.add("Add", nodes.constant(grid), _clamped(site, 2, update.shape))
    return [nodes.add("ScatterND", site.names[0], places, site.names[1])]


# Reductions


def _reduction(name: str) -> Exporter:
    def export(site: Site) -> list[str]:
        axes = site.attributes.axes  # type: ignore[attr-defined]
        if not axes:
            return [site.nodes.add("Identity", site.names[0])]
        return [site.nodes.add(name, site.names[0], site.nodes.integers(axes), keepdims=0)]

    return export


REDUCTIONS: dict[Op, str] = {
    reductions.REDUCE_SUM: "ReduceSum",
    reductions.REDUCE_PROD: "ReduceProd",
    reductions.REDUCE_MAX: "ReduceMax",
    reductions.REDUCE_MIN: "ReduceMin",
}
for _op, _name in REDUCTIONS.items():
    EXPORT(_op)(_reduction(_name))
mean = _reduction("ReduceMean")
logsumexp = _reduction("ReduceLogSumExp")


@EXPORT(reductions.ARGMAX, reductions.ARGMIN)
def _arg(site: Site) -> list[str]:
    assert isinstance(site.attributes, reductions.ArgReduce)
    name = "ArgMax" if site.node.op is reductions.ARGMAX else "ArgMin"
    found = site.nodes.add(name, site.names[0], axis=site.attributes.axis, keepdims=0)
    return [site.nodes.cast(found, dtypes.int32)]


@EXPORT(reductions.CUMSUM)
def _cumsum(site: Site) -> list[str]:
    attributes = site.attributes
    assert isinstance(attributes, reductions.Cumulate)
    axis = site.nodes.constant(np.array(attributes.axis, np.int64))
    return [site.nodes.add("CumSum", site.names[0], axis, reverse=int(attributes.reverse))]


@EXPORT(reductions.SORT, reductions.TOP_K)
def _ordered(site: Site) -> list[str]:
    """`TopK` of all, or of some; equal elements keep their order."""
    attributes = site.attributes
    if isinstance(attributes, reductions.Sort):
        axis, largest = attributes.axis, attributes.descending
        count = site.nodes.sizes((site.sizes(0)[axis],))
    else:
        assert isinstance(attributes, reductions.TopK)
        axis, largest = attributes.axis, attributes.largest
        count = site.nodes.integers([attributes.k])
    inputs = [site.names[0], count]
    options = {"axis": axis, "largest": int(largest), "sorted": 1}
    values, indices = site.nodes.several("TopK", inputs, 2, **options)
    return [values, site.nodes.cast(indices, dtypes.int32)]
