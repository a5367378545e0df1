"""Exporters of products, windows, gather and scatter."""

from __future__ import annotations

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.shapes import inverse_permutation, windows
from treadle.interop.onnx.writer.sizes import Sizes
from treadle.interop.onnx.writer.walk import EXPORT, Site
from treadle.ir.composites import Conv
from treadle.ir.ops import indexing, linear


@EXPORT(linear.CONTRACT)
def _contract(site: Site) -> list[str]:
    """A product of matrices where it is one, or else `Einsum`."""
    attributes = site.attributes
    assert isinstance(attributes, linear.Contraction)
    x, y = operands_of(site)
    lx, ly, lr = attributes.labels
    batch = "".join(c for c in lx if c in ly and c in lr)
    shared = "".join(c for c in lx if c in ly and c not in lr)
    if len(shared) == 1 and site.types[0].size and site.types[1].size:
        rows = lx[len(batch) : -1]
        columns = "".join(c for c in ly if c not in batch and c != shared)
        is_left = lx == batch + rows + shared and lr == batch + rows + columns
        is_one = len(columns) == 1 and (len(rows) == 1 or not batch)
        if is_left and is_one and ly == batch + shared + columns:
            return [site.nodes.add("MatMul", x, y)]
        if is_left and is_one and ly == batch + columns + shared:
            rank = len(ly)
            order = (*range(rank - 2), rank - 1, rank - 2)
            return [site.nodes.add("MatMul", x, site.nodes.permute(y, order))]
    return [site.nodes.add("Einsum", x, y, equation=f"{lx},{ly}->{lr}")]


def operands_of(site: Site) -> list[str]:
    """The operands in the dtype of the result: narrow floats are added up in a wider one."""
    attributes = site.attributes
    assert isinstance(attributes, linear.Contraction)
    dtype = attributes.dtype
    pairs = zip(site.names, site.types, strict=True)
    return [n if t.dtype is dtype else site.nodes.cast(n, dtype) for n, t in pairs]


def convolution(site: Site, *bias: str) -> list[str]:
    """`Conv`: ONNX has the pads of all beginnings first, then those of all ends."""
    a = site.attributes
    assert isinstance(a, Conv)
    lows, highs = zip(*a.padding, strict=True)
    name = site.nodes.add(
        "Conv",
        *site.names,
        *bias,
        strides=a.strides,
        pads=[*lows, *highs],
        dilations=a.dilations,
        group=a.groups,
        kernel_shape=site.types[1].shape[2:],
    )
    return [name]


# Windows


def _indices(size: int, kernel: int, stride: int, dilation: int) -> np.ndarray:
    """Where each element of each window lies: (windows, kernel)."""
    count = windows(size, kernel, stride, dilation)
    return np.arange(count)[:, None] * stride + np.arange(kernel)[None, :] * dilation


@EXPORT(linear.WINDOW)
def _window(site: Site) -> list[str]:
    """Each axis by a gather, whose elements of a window then go to the end."""
    window = site.attributes
    assert isinstance(window, linear.Window)
    name, rank = site.names[0], site.types[0].rank
    given = zip(window.axes, window.sizes, window.strides, window.dilations, strict=True)
    for axis, kernel, stride, dilation in given:
        places = _indices(site.fixed(0, axis), kernel, stride, dilation)
        name = site.nodes.add("Gather", name, site.nodes.constant(places), axis=axis)
        rank += 1
        order = [i for i in range(rank) if i != axis + 1]
        name = site.nodes.permute(name, [*order, axis + 1])
    return [name]


@EXPORT(linear.UNWINDOW)
def _unwindow(site: Site) -> list[str]:
    """Each axis, the last first, by a product with zeros and ones that says what lies where."""
    attributes = site.attributes
    assert isinstance(attributes, linear.Unwindow)
    window = attributes.window
    name, dtype = site.names[0], site.types[0].dtype
    sizes = list(site.sizes(0))
    for i in reversed(range(len(window.axes))):
        axis, kernel = window.axes[i], window.sizes[i]
        size = attributes.shape[axis]
        places = _indices(size, kernel, window.strides[i], window.dilations[i])
        rank = len(sizes)
        # The windows of the axis beside the elements of each, at the end.
        order = [j for j in range(rank - 1) if j != axis]
        name = site.nodes.permute(name, [*order, axis, rank - 1])
        flat: Sizes = (*(sizes[j] for j in order), places.size)
        where = np.eye(size, dtype=dtype.numpy)[places.reshape(-1)]
        name = site.nodes.add("MatMul", site.nodes.reshape(name, flat), site.nodes.constant(where))
        back = inverse_permutation([*order, axis])
        name = site.nodes.permute(name, back)
        sizes = [*sizes[:axis], size, *sizes[axis + 1 : -1]]
    return [name]


# Indices


def _wide_indices(site: Site, operand: int) -> str:
    name, dtype = site.names[operand], site.types[operand].dtype
    return name if dtype is dtypes.int64 else site.nodes.cast(name, dtypes.int64)


@EXPORT(indexing.GATHER)
def gather(site: Site) -> list[str]:
    attributes = site.attributes
    axis, batch = (
        (attributes.axis, attributes.batch) if isinstance(attributes, indexing.Gather) else (0, 0)
    )
    indices = _wide_indices(site, 1)
    if batch == 0:
        return [site.nodes.add("Gather", site.names[0], indices, axis=axis)]
    rank, chosen = site.types[0].rank, site.types[1].rank - batch
    order = [*range(batch), axis, *(i for i in range(batch, rank) if i != axis)]
    data = site.nodes.permute(site.names[0], order)
    points = site.nodes.reshape(indices, (*site.sizes(1), 1))
    taken = site.nodes.add("GatherND", data, points, batch_dims=batch)
    # (batch …, chosen …, axes before, axes after) → (batch …, axes before, chosen …, axes after)
    before = axis - batch
    first = batch + chosen
    total = first + rank - batch - 1
    back = [*range(batch), *range(first, first + before), *range(batch, first)]
    return [site.nodes.permute(taken, [*back, *range(first + before, total)])]


@EXPORT(indexing.SCATTER_ADD)
def _scatter_add(site: Site) -> list[str]:
    """`ScatterND` into zeros, with the axis after the batch axes."""
    attributes = site.attributes
    assert isinstance(attributes, indexing.ScatterAdd)
    axis, batch = attributes.axis, attributes.batch
    nodes, result = site.nodes, list(site.result_sizes())
    chosen = site.types[1].rank - batch
    rank = site.types[0].rank
    before = list(range(batch, axis))
    order = [*range(batch), *range(axis, axis + chosen), *before, *range(axis + chosen, rank)]
    updates = nodes.permute(site.names[0], order)
    placed = [*range(batch), axis, *before, *range(axis + 1, len(result))]
    zeros = nodes.expand(nodes.constant(0, site.types[0].dtype), tuple(result[i] for i in placed))
    indices = nodes.reshape(_wide_indices(site, 1), (*site.sizes(1), 1))
    if batch:
        indices = _with_batch(site, indices, batch)
    summed = nodes.add("ScatterND", zeros, indices, updates, reduction="add")
    return [nodes.permute(summed, inverse_permutation(placed))]


def _with_batch(site: Site, indices: str, batch: int) -> str:
    """Indices (batch …, chosen …, 1) with the numbers of the batch axes before them."""
    sizes = site.sizes(1)
    if not all(isinstance(n, int) for n in sizes):
        raise ArgumentError("export", "scatter_add along a batch that is not fixed", "Fix it.")
    shape = site.types[1].shape
    grids = [np.broadcast_to(g[..., None], (*shape, 1)) for g in np.indices(shape)[:batch]]
    lead = site.nodes.constant(np.concatenate(grids, -1).astype(np.int64))
    return site.nodes.add("Concat", lead, indices, axis=-1)
