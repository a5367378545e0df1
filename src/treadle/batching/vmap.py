"""`vmap`: a function of one element as a function of a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps

from treadle.base import trees
from treadle.base.errors import ArgumentError, AxisError, ShapeError, TraceError
from treadle.base.shapes import normal_axis
from treadle.base.trees import Tree
from treadle.batching.walk import RANDOMNESS, batch_graph, repeated
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import moveaxis
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import (
    Traced,
    emit,
    function_name,
    outline,
    register_effects,
    tensors_of,
    trace_inside,
)
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.types import TensorType

Function = Callable[..., Tree]
Dims = Tree  # an axis or None, or a tree of them that begins as the arguments do


def vmap(
    function: Function, in_dims: Dims = 0, out_dims: Dims = 0, randomness: str = "different"
) -> Function:
    """The function over an axis of its arguments: written for one element, run for all at once.

    `in_dims` says which axis of each argument is mapped, None for those that are the same for every
    element; `out_dims` where it stands in the results, None for those that do not differ. Each is
    one number for all, or a tuple with an entry for each, or a tree. Keyword arguments are not
    mapped. Random numbers are `"different"` for each element, the `"same"`, or an `"error"`.

    Shapes: a function (A,) → (B,) becomes one (n, A) → (n, B).
    """
    if randomness not in RANDOMNESS:
        raise ArgumentError(
            "vmap", f"randomness = {randomness!r}", f"Use one of {', '.join(RANDOMNESS)}."
        )

    @wraps(function)
    def call(*arguments: Tree, **keywords: object) -> Tree:
        given = tensors_of(arguments)
        dims = _dims("in_dims", in_dims, given)
        leaves, structure = trees.flatten(given)
        axes = [_axis(x.type, d, i) for i, (x, d) in enumerate(zip(leaves, dims, strict=True))]
        size = _size(function_name(function), leaves, axes)
        elements = structure.rebuild(map(_element, leaves, axes))
        whole = partial(function, **keywords) if keywords else function
        traced = trace_inside(whole, elements, function_name(function))
        names = frozenset(n for n, a in zip(traced.names, axes, strict=True) if a is not None)
        graph = batch_graph(traced.graph, names, size, randomness, _metrics(traced.graph))
        moved = [x if a is None else moveaxis(x, a, 0) for x, a in zip(leaves, axes, strict=True)]
        values = emit(graph, traced.inputs_for([moved]))
        _register(traced.graph, values)
        return _placed(traced, values, out_dims, size)

    return call


def _dims(name: str, dims: Dims, tree: Tree) -> list[int | None]:
    """One entry for each leaf of a tree; an entry for a container counts for all inside."""
    if dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        return [dims] * len(trees.flatten(tree)[0])
    inner, outer = trees.children(dims), trees.children(tree)
    fits = inner is not None and outer is not None
    if not fits or [k for k, _ in inner or []] != [k for k, _ in outer or []]:
        shown = outline(trees.flatten(tree)[1])
        what = "arguments" if name == "in_dims" else "results"
        raise ArgumentError(
            "vmap",
            f"{name} = {dims!r} does not fit the {what} {shown}, counting tensors",
            "Give one axis for all, or a tuple with an axis or None for each.",
        )
    pairs = zip(inner or [], outer or [], strict=True)
    return [found for (_, d), (_, part) in pairs for found in _dims(name, d, part)]


def _axis(type_: TensorType, dim: int | None, position: int) -> int | None:
    if dim is None:
        return None
    axis = normal_axis(dim, type_.rank)
    if axis is None:
        raise AxisError(
            "vmap",
            f"in_dims has the axis {dim} for tensor {position} of the arguments, {type_}",
            "Use None in in_dims for what is the same for every element.",
        )
    return axis


def _size(name: str, leaves: Sequence[Tensor], axes: Sequence[int | None]) -> int:
    """How many elements there are."""
    sizes = {x.shape[a] for x, a in zip(leaves, axes, strict=True) if a is not None}
    shown = ", ".join(f"{x.type} along {a}" for x, a in zip(leaves, axes, strict=True))
    if not sizes:
        raise ArgumentError(
            "vmap",
            f"no argument of {name} is mapped: {shown or 'there is none'}",
            "Give an axis in in_dims for one of them at least.",
        )
    if len(sizes) > 1:
        raise ShapeError(
            "vmap",
            f"the mapped axes of the arguments of {name} differ: {shown}",
            "They must have equal sizes; use None in in_dims for what is not mapped.",
        )
    (size,) = sizes
    return size


def _element(x: Tensor, axis: int | None) -> TensorType:
    if axis is None:
        return x.type
    return x.type.with_shape(x.shape[:axis] + x.shape[axis + 1 :])


def _placed(traced: Traced, values: Sequence[Tensor], out_dims: Dims, size: int) -> Tree:
    """The results with the axis where it is asked for."""
    structure = traced.structure
    found = []
    shaped = structure.rebuild(range(structure.leaves))
    for i, dim in enumerate(_dims("out_dims", out_dims, shaped)):
        value, rank = values[i], traced.graph.output_types[i].rank
        is_batched = value.ndim > rank
        if dim is None:
            if is_batched:
                raise ArgumentError(
                    "vmap",
                    f"out_dims is None for result {i}, which differs between elements",
                    "Give an axis for it; None is for what does not depend on a mapped argument.",
                )
            found.append(value)
            continue
        axis = normal_axis(dim, rank + 1)
        if axis is None:
            raise AxisError(
                "vmap",
                f"out_dims has the axis {dim} for result {i}, which has {rank} and the mapped one",
                f"Axes are {-rank - 1} to {rank}.",
            )
        found.append(moveaxis(value if is_batched else repeated(value, size), 0, axis))
    return structure.rebuild(found)


def _metrics(graph: Graph) -> frozenset[int]:
    """Outputs that are averaged over the elements."""
    kinds = (OutputKind.METRIC, OutputKind.WEIGHT)
    return frozenset(i for i, o in enumerate(graph.outputs) if o.kind in kinds)


def _register(graph: Graph, values: Sequence[Tensor]) -> None:
    """Effects of the elements: captures and prints as batches, metrics averaged by weight."""
    types = graph.output_types
    weights = {o.name: i for i, o in enumerate(graph.outputs) if o.kind is OutputKind.WEIGHT}
    effects: list[tuple[Output, Tensor]] = []
    for i, (output, value) in enumerate(zip(graph.outputs, values, strict=True)):
        if output.kind is OutputKind.UPDATE and value.ndim > types[i].rank:
            raise TraceError(
                "update",
                f"the state {output.name!r} is updated inside td.vmap, to another value for each "
                "element",
                "Return the value from the function and update the state with one made of all.",
            )
        if output.kind is OutputKind.METRIC:
            weight = values[weights[output.name]]
            value = sum_of(value * weight) / sum_of(weight)
        elif output.kind is OutputKind.WEIGHT:
            value = sum_of(value)
        effects.append((output, value))
    register_effects([o for o, _ in effects], [v for _, v in effects])
