"""`scan`, `checkpoint`: functions that become bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from treadle.base import dtypes, trees
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import concat, integer_of, iota, slice_along, stack
from treadle.frontend.scopes import Trace, bind, current_trace, into_scope, tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import (
    function_name,
    outline,
    register_effects,
    tensors_of,
    trace_inside,
)
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.ops.indexing import KEY_TYPE
from treadle.ir.ops.leaves import Leaf
from treadle.ir.rewrite import cut
from treadle.ir.types import TensorType


def checkpoint(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same function, whose values are computed again for the backward instead of kept."""

    @wraps(function)
    def call(*arguments: Tree) -> Tree:
        given = tensors_of(arguments)
        if current_trace() is None and all(
            t.scope.depth == 0 for a in given for t in trees.flatten(a)[0]
        ):
            return function(*given)
        traced = trace_inside(function, given, function_name(function))
        operands = [*(t for a in given for t in trees.flatten(a)[0]), *traced.outer]
        attributes = Call(traced.graph, function_name(function), recompute=True)
        values = bind(CALL, attributes, *operands)
        register_effects(traced.graph.outputs, values)
        return traced.structure.rebuild(values[: traced.structure.leaves])

    return call


def scan(
    function: Callable[[Tree, Tree], tuple[Tree, Tree]],
    init: Tree,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    recompute: bool = False,
) -> tuple[Tree, Tree]:
    """carry, y = function(carry, x) along the leading axis of xs; the last carry and stacked ys.

    The gradient keeps what it needs of each step, or only the carries with `recompute=True`.
    """
    carry, slices = tensors_of((init, xs))
    steps = _scan_length(trees.flatten(slices)[0], length)
    if current_trace() is None:
        return _eager_scan(function, carry, slices, steps, reverse)
    carries, carry_structure = trees.flatten(carry)
    rows, row_structure = trees.flatten(slices)
    with tracing(function_name(function)) as body:
        inner_carry = [body.input(f"carry.{i}", t.type) for i, t in enumerate(carries)]
        inner_rows = [body.input(f"x.{i}", _row_type(t)) for i, t in enumerate(rows)]
        index: list[Tensor] = []
        body.make_key = lambda outer: _step_key(body, outer, steps, index)
        result = function(carry_structure.rebuild(inner_carry), row_structure.rebuild(inner_rows))
        graph, y_structure = _finish_body(body, result, inner_carry, carry_structure)
    if index:
        rows = [*rows, iota((steps,), 0, dtypes.uint32)]
    inner = [*(t for _, t in body.adopted), *inner_carry, *inner_rows, *index]
    graph = cut(graph, [(_input_name(graph, t), t.handle) for t in inner], graph.outputs)
    attributes = Scan(graph, len(body.adopted), len(carries), steps, reverse, recompute)
    values = bind(SCAN, attributes, *(t for t, _ in body.adopted), *carries, *rows)
    stacked = values[len(carries) :]
    _register_stacked(graph.outputs[len(carries) :], stacked)
    last = carry_structure.rebuild(values[: len(carries)])
    return last, y_structure.rebuild(stacked[: y_structure.leaves])


def _eager_scan(
    function: Callable[[Tree, Tree], tuple[Tree, Tree]],
    carry: Tree,
    xs: Tree,
    steps: int,
    reverse: bool,
) -> tuple[Tree, Tree]:
    outputs: list[list[Tensor]] = []
    y_structure = None
    carries, carry_structure = trees.flatten(carry)
    rows, row_structure = trees.flatten(xs)
    for i in reversed(range(steps)) if reverse else range(steps):
        row = row_structure.rebuild(t[i] for t in rows)
        result = function(carry_structure.rebuild(carries), row)
        carries, ys, y_structure = _checked_step(result, carries, carry_structure)
        outputs.append(ys)
    if y_structure is None:
        raise ArgumentError(
            "scan", "an eager scan of no steps has no results", "Trace it, or give it a step."
        )
    if reverse:
        outputs.reverse()
    stacked = y_structure.rebuild(stack(column) for column in zip(*outputs, strict=True))
    return carry_structure.rebuild(carries), stacked


def _scan_length(rows: Sequence[Tensor], length: int | None) -> int:
    if length is not None and integer_of("scan", "the length", length) < 0:
        raise ArgumentError("scan", f"the length is {length}", "Give 0 or more steps.")
    for row in rows:
        if row.ndim == 0:
            raise ShapeError(
                "scan", f"{row.type} has no leading axis to scan over", "Pass it as a carry."
            )
        if length is not None and row.shape[0] != length:
            raise ShapeError(
                "scan",
                f"leading axes differ: {row.type} has {row.shape[0]}, expected {length}",
                "All xs have one row for each step.",
            )
        length = row.shape[0]
    if length is None:
        raise ArgumentError(
            "scan", "neither xs nor length is given", "Give the number of steps as length=."
        )
    return length


def _row_type(x: Tensor) -> TensorType:
    return x.type.with_shape(x.shape[1:])


def _step_key(body: Trace, outer: Tensor, steps: int, index: list[Tensor]) -> Tensor:
    """The key of one step: the scan index counts steps of all enclosing scans."""
    index.append(body.input("x.index", TensorType((), dtypes.uint32)))
    step = slice_along(outer, 0, 4, 5) * steps + index[0]
    return concat([slice_along(outer, 0, 0, 4), step, slice_along(outer, 0, 5, KEY_TYPE.shape[0])])


def _finish_body(
    body: Trace, result: Any, carries: Sequence[Tensor], structure: trees.Structure
) -> tuple[Graph, trees.Structure]:
    new, ys, y_structure = _checked_step(result, carries, structure)
    return body.finish([into_scope(t, body) for t in (*new, *ys)]), y_structure


def _checked_step(
    result: Any, carries: Sequence[Tensor], structure: trees.Structure
) -> tuple[list[Tensor], list[Tensor], trees.Structure]:
    """The next carries, and the leaves and structure of y, of what a body returns."""
    if not isinstance(result, tuple) or len(result) != 2:
        kind = type(result).__name__
        shown = f"a {kind} of {len(result)}" if isinstance(result, tuple) else f"a {kind}"
        raise ArgumentError(
            "scan", f"the body returns {shown}", "Return (carry, y); y may be None."
        )
    new = unchanged("scan", "carry", result[0], carries, structure)
    ys, y_structure = trees.flatten(result[1])
    return new, [as_tensor(y) for y in ys], y_structure


def unchanged(
    name: str, noun: str, returned: Tree, given: Sequence[Tensor], structure: trees.Structure
) -> list[Tensor]:
    """What a body returns for the next iteration, which must be as what it was given."""
    after, found = trees.flatten(returned)
    if found != structure:
        raise ArgumentError(
            name,
            f"the {noun} comes back in another structure: {outline(found)}, not "
            f"{outline(structure)}",
            "Return what was given, updated.",
        )
    new = [as_tensor(t) for t in after]
    for i, (old, t) in enumerate(zip(given, new, strict=True)):
        if old.type != t.type:
            error = DTypeError if old.shape == t.shape else ShapeError
            raise error(
                name,
                f"{noun} {i} is {old.type} and comes back as {t.type}",
                "Its type must stay: start with the type it takes, or cast it.",
            )
    return new


def _input_name(graph: Graph, tensor: Tensor) -> str:
    attributes = graph.nodes[tensor.handle.node].attributes
    assert isinstance(attributes, Leaf)
    return attributes.name


def _register_stacked(outputs: Sequence[Output], values: Sequence[Tensor]) -> None:
    """Effects of the steps: captures and prints are stacked, metrics are averaged by weight."""
    weights = {
        o.name: v for o, v in zip(outputs, values, strict=True) if o.kind is OutputKind.WEIGHT
    }
    effects: list[tuple[Output, Tensor]] = []
    for output, value in zip(outputs, values, strict=True):
        if output.kind is OutputKind.METRIC:
            weight = weights[output.name]
            effects.append((output, sum_over(value * weight) / sum_over(weight)))
        elif output.kind is OutputKind.WEIGHT:
            effects.append((output, sum_over(value)))
        else:
            effects.append((output, value))
    register_effects([o for o, _ in effects], [v for _, v in effects])
