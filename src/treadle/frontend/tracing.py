"""Functions to graphs, graphs back into the current scope, and what leaves a trace on the side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.arrays import FILL, lost_mask
from treadle.base.errors import ArgumentError, TraceError
from treadle.base.origin import Origin
from treadle.base.trees import Structure, Tree
from treadle.domains.domain import evaluate
from treadle.frontend.coerce import as_tensor, dtype_of_data, tensor
from treadle.frontend.scopes import (
    EAGER,
    RANDOM_STATE,
    Eager,
    Trace,
    current_scope,
    current_trace,
    into_scope,
    isolated_tracing,
    region_tracing,
    tracing,
)
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as a graph. Inputs are the arguments' leaves, then the adopted outer tensors."""

    graph: Graph
    names: tuple[str, ...]  # of the arguments' leaves
    outer: tuple[Tensor, ...]  # tensors of enclosing scopes that the function uses
    structure: Structure  # of the result

    def inputs_for(self, arguments: Sequence[Tree]) -> dict[str, Tensor]:
        """The graph's leaves by name, for arguments like those it was traced with."""
        leaves = [t for a in arguments for t in trees.flatten(a)[0]]
        names = (*self.names, *(f"^{i}" for i in range(len(self.outer))))
        bound = dict(zip(names, [*leaves, *self.outer], strict=True))
        if RANDOM_STATE in self.graph.leaves:
            # Nothing encloses the trace: the eager stream goes on, once for value and gradients.
            bound[RANDOM_STATE] = EAGER.program_key()
        return bound


def trace(function: Callable[..., Tree], *specs: Tree, name: str | None = None) -> Graph:
    """The graph of a function. Each argument is a tree of specs or of example arrays."""
    arguments = [trees.map_leaves(spec_of, s) for s in specs]
    with isolated_tracing(name or function_name(function)) as current:
        traced = _run(function, arguments, current)
    return remove_dead_code(traced.graph)


def trace_inside(function: Callable[..., Tree], arguments: Sequence[Tree], title: str) -> Traced:
    """The graph of a function called from the current scope; it may use outer tensors."""
    with tracing(title) as current:
        return _run(function, arguments, current)


def trace_region(function: Callable[..., Tree], arguments: Sequence[Tree], title: str) -> Traced:
    """The graph of a function with all of its work, whichever tensors it uses."""
    with region_tracing(title) as current:
        return _run(function, arguments, current)


def _run(function: Callable[..., Tree], arguments: Sequence[Tree], current: Trace) -> Traced:
    if not callable(function):
        raise ArgumentError("trace", f"{function!r} is not a function", "Pass one of tensors.")
    names = argument_names(function, arguments)
    leaves, structure = trees.flatten(list(arguments))
    inputs = [
        current.input(n, t.type if isinstance(t, Tensor) else t)
        for n, t in zip(names, leaves, strict=True)
    ]
    result = function(*structure.rebuild(inputs))
    values, shape = trees.flatten(result)
    results = [_result(current, v) for v in values]
    graph = current.finish(results)
    return Traced(graph, tuple(names), tuple(outer for outer, _ in current.adopted), shape)


def _result(current: Trace, value: object) -> Tensor:
    if isinstance(value, Tensor) and isinstance(value.scope, Trace):
        value.scope.check_open("trace")
    try:
        found = as_tensor(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TraceError(
            "trace",
            f"{current.title} returns {value!r}, which is not a tensor",
            "Return tensors, numbers or trees of them.",
        ) from error
    return into_scope(found, current)


def spec_of(value: object) -> TensorType:
    """The type of a spec or of an example."""
    if isinstance(value, TensorType):
        return value
    if isinstance(value, Tensor):
        return value.type
    lost = lost_mask(value)
    if lost is not None:
        raise ArgumentError("trace", f"an example {lost}", FILL)
    array = np.asarray(value)
    if array.dtype == object:
        raise ArgumentError(
            "trace", f"{value!r} is neither a Spec nor an array", "Pass td.Spec(shape, dtype)."
        )
    return TensorType(array.shape, dtype_of_data(value, array))


def function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def argument_names(function: Callable[..., Any], arguments: Sequence[Tree]) -> list[str]:
    """A name for each leaf: the parameter's, with a dotted path inside containers."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    tops = [positional[i] if i < len(positional) else f"arg{i}" for i in range(len(arguments))]
    return [
        path
        for top, argument in zip(tops, arguments, strict=True)
        for path in trees.paths(argument, top)
    ]


def tensors_of(arguments: Sequence[Tree]) -> list[Tree]:
    """Arguments with every leaf a tensor: arrays and numbers become eager ones or constants."""
    return [trees.map_leaves(_argument, a) for a in arguments]


def _argument(value: Operand) -> Tensor:
    if isinstance(value, (Tensor, Placeholder)):
        return as_tensor(value)
    return tensor(value) if current_trace() is None else as_tensor(value)


def outline(structure: Structure) -> str:
    """A tree for messages: its containers, with the leaves numbered."""
    return repr(structure.rebuild(range(structure.leaves)))


def emit(graph: Graph, inputs: Mapping[str, Tensor], origin: Origin | None = None) -> list[Tensor]:
    """Run a graph in the current scope; all outputs. Effects are left to `register_effects`."""
    scope: Trace | Eager = current_scope()
    if isinstance(scope, Trace):
        leaves = {name: into_scope(t, scope).handle for name, t in inputs.items()}
        return [scope.tensor(v) for v in inline_into(scope.builder, graph, leaves, origin)]
    typed = {name: t.handle for name, t in inputs.items()}
    values = evaluate(graph, typed, EAGER.oracle)
    return [Tensor(EAGER, t, v) for t, v in zip(graph.output_types, values, strict=True)]


def register_effects(outputs: Sequence[Output], values: Sequence[Tensor]) -> None:
    """Hand the effects of an inner graph to the scope it was emitted into."""
    scope = current_scope()
    for output, value in zip(outputs, values, strict=True):
        if output.kind in (OutputKind.RESULT, OutputKind.GRADIENT):
            continue
        if isinstance(scope, Trace):
            scope.add_effect(output.kind, output.name, into_scope(value, scope))
        elif output.kind is OutputKind.PRINT:
            print_value(output.name, value.numpy())


def _check_name(operation: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(
            operation,
            f"the name is {name!r}, a {type(name).__name__}",
            f'The name comes first, as a string: td.{operation}("name", x).',
        )


def capture(name: str, x: Operand) -> Tensor:
    """Name an intermediate value so that a step can return it: `step(batch, captures=True)`."""
    _check_name("capture", name)
    value = as_tensor(x)
    scope = current_trace()
    if scope is not None:
        scope.add_effect(OutputKind.CAPTURE, name, into_scope(value, scope))
    return value


PART = "loss."  # begins the names of captures that are parts of the loss


def capture_part(name: str, x: Operand) -> None:
    """Name a part of the loss as it stands in the sum, for optimizers that look at each."""
    capture(PART + name, x)


def metric(name: str, value: Operand, weight: Operand = 1) -> Tensor:
    """Report a number with every step; means over steps are weighted by `weight`."""
    _check_name("metric", name)
    number, amount = as_tensor(value), as_tensor(weight)
    for label, t in (("value", number), ("weight", amount)):
        if t.shape != ():
            raise ArgumentError(
                "metric", f"the {label} of {name!r} is {t.type}, not a scalar", "Reduce it first."
            )
    scope = current_trace()
    if scope is not None:
        scope.add_effect(OutputKind.METRIC, name, into_scope(number, scope))
        scope.add_effect(OutputKind.WEIGHT, name, into_scope(amount, scope))
    return number


def debug_print(format: str, x: Operand) -> Tensor:
    """Print x whenever the program runs: where the format has `{}`, or else after it."""
    value = as_tensor(x)
    format = _checked_format(format, value.type)
    scope = current_trace()
    if scope is not None:
        scope.add_effect(OutputKind.PRINT, format, into_scope(value, scope))
    else:
        print_value(format, value.numpy())
    return value


def _checked_format(format: str, type_: TensorType) -> str:
    """Now, on the user's line, rather than when the program runs. Without a field, one is added."""
    if not isinstance(format, str):
        raise ArgumentError(
            "debug_print", f"the format is {format!r}", 'Write td.debug_print("x = {}", x).'
        )
    try:
        has_field = any(field is not None for _, field, _, _ in Formatter().parse(format))
        format = format if has_field else f"{format} {{}}" if format else "{}"
        format.format(np.broadcast_to(np.zeros((), type_.dtype.numpy), type_.shape))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            "debug_print",
            f"the format {format!r} does not take {type_}: {error}",
            "Use {} for the value.",
        ) from error
    return format


def print_value(format: str, value: np.ndarray) -> None:
    print(format.format(value))
