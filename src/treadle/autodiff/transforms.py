"""`grad`, `value_and_grad`, `vjp`, `jvp`, `custom_vjp`: functions to functions. They compose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from treadle.autodiff.backward import check_scalar, ct_inputs, differentiate, vjp_graph
from treadle.base import trees
from treadle.base.errors import ArgumentError, GradientError, UnreachedWarning
from treadle.base.origin import user_origin
from treadle.base.trees import Tree
from treadle.domains.domain import Domain, evaluate
from treadle.domains.dual import Dual, DualNumber
from treadle.domains.symbolic import Symbolic
from treadle.frontend.coerce import as_tensor, constant
from treadle.frontend.scopes import (
    EAGER,
    Trace,
    bind,
    current_scope,
    current_trace,
    into_scope,
    tracing,
)
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import (
    Traced,
    argument_names,
    emit,
    function_name,
    outline,
    register_effects,
    tensors_of,
    trace_inside,
)
from treadle.ir.control import CALL, Call, bodies
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.types import TensorType

Function = Callable[..., Tree]


def grad(function: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """The gradient of a scalar function with respect to some of its arguments, trees included.

    With `has_aux` the function returns (scalar, other) and the gradient comes as (gradient, other).
    """
    both = value_and_grad(function, argnums, has_aux)

    @wraps(function)
    def call(*arguments: Tree) -> Tree:
        value, gradient = both(*arguments)
        return (gradient, value[1]) if has_aux else gradient

    return call


def value_and_grad(
    function: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Function:
    """(value, gradient) of a scalar function; the value is (scalar, other) with `has_aux`."""

    @wraps(function)
    def call(*arguments: Tree) -> tuple[Tree, Tree]:
        given = tensors_of(arguments)
        chosen = _chosen(function, argnums, len(given))
        traced = trace_inside(function, given, function_name(function))
        _check_loss(traced, has_aux)
        names = _names_by_argument(function, given)
        result = differentiate(traced.graph, [n for i in chosen for n in names[i]])
        if result.unreached:
            _warn_unreached(function, result.unreached)
        values = emit(result.graph, traced.inputs_for(given))
        register_effects(result.graph.outputs, values)
        gradients = {
            o.name: v
            for o, v in zip(result.graph.outputs, values, strict=True)
            if o.kind is OutputKind.GRADIENT
        }
        parts = [_gradient_tree(given[i], names[i], gradients) for i in chosen]
        value = traced.structure.rebuild(values[: traced.structure.leaves])
        return value, parts[0] if isinstance(argnums, int) else tuple(parts)

    return call


def _chosen(function: Function, argnums: int | Sequence[int], count: int) -> list[int]:
    given = [argnums] if isinstance(argnums, int) else list(argnums)
    for i in given:
        if not -count <= i < count:
            cause = f"argnums {argnums} for {count} arguments of {function_name(function)}"
            raise ArgumentError("grad", cause, "Arguments are counted from 0.")
    return [i % count for i in given]


def _check_loss(traced: Traced, has_aux: bool) -> None:
    structure = traced.structure
    is_pair = structure.kind is tuple and len(structure.children) == 2
    loss = structure.children[0] if has_aux and is_pair else structure
    if loss.kind is not None or (has_aux and not is_pair):
        expected = "(scalar, other), as has_aux is set" if has_aux else "one scalar"
        raise GradientError(
            "grad",
            f"the function returns {outline(structure)}, counting tensors, not {expected}",
            "Return one scalar, or (scalar, other) with has_aux=True.",
        )
    graph = traced.graph
    check_scalar(Tensor(EAGER, graph.type_of(graph.outputs[0].value), None))


def _names_by_argument(function: Function, given: Sequence[Tree]) -> list[list[str]]:
    names = iter(argument_names(function, given))
    return [[next(names) for _ in trees.flatten(a)[0]] for a in given]


def _gradient_tree(argument: Tree, names: Sequence[str], gradients: dict[str, Tensor]) -> Tree:
    leaves, structure = trees.flatten(argument)
    return structure.rebuild(
        gradients[n] if n in gradients else constant(0, t.shape, t.dtype)
        for n, t in zip(names, leaves, strict=True)
    )


def _warn_unreached(function: Function, names: Sequence[str]) -> None:
    cause = f"the result of {function_name(function)} does not depend on {', '.join(names)}"
    origin = user_origin()
    file, line = (origin.file, origin.line) if origin else ("treadle", 0)
    warnings.warn_explicit(f"grad: {cause} [{origin}]", UnreachedWarning, file, line)


def vjp(function: Function, *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]]]:
    """The result, and a function from its cotangent to those of the arguments."""
    given = tensors_of(primals)
    traced = trace_inside(function, given, function_name(function))
    inputs = traced.inputs_for(given)
    values = emit(traced.graph, inputs)
    register_effects(traced.graph.outputs, values)
    count = traced.structure.leaves
    names = _names_by_argument(function, given)
    floats = [n for a, ns in zip(given, names, strict=True) for t, n in _float_leaves(a, ns)]
    present = [i < count and v.dtype.is_float for i, v in enumerate(values)]
    graph = vjp_graph(traced.graph, present, floats)

    def pull(cotangent: Tree) -> tuple[Tree, ...]:
        cts, structure = trees.flatten(tensors_of([cotangent])[0])
        if structure != traced.structure:
            raise GradientError(
                "vjp",
                f"the cotangent has another structure than the result: {outline(structure)}, not "
                f"{outline(traced.structure)}",
                "Give one cotangent for each result.",
            )
        for i, (ct, value) in enumerate(zip(cts, values, strict=False)):
            if present[i] and ct.type != value.type:
                raise GradientError(
                    "vjp",
                    f"the cotangent is {ct.type}, the result {value.type}",
                    "They must be equal.",
                )
        seeds = ct_inputs(
            traced.graph, [ct if p else None for ct, p in zip(cts, present, strict=False)]
        )
        found = dict(zip((o.name for o in graph.outputs), emit(graph, inputs | seeds), strict=True))
        return tuple(_gradient_tree(a, ns, found) for a, ns in zip(given, names, strict=True))

    return traced.structure.rebuild(values[:count]), pull


def _float_leaves(argument: Tree, names: Sequence[str]) -> list[tuple[Tensor, str]]:
    return [
        (t, n) for t, n in zip(trees.flatten(argument)[0], names, strict=True) if t.dtype.is_float
    ]


def jvp(function: Function, primals: Sequence[Tree], tangents: Sequence[Tree]) -> tuple[Tree, Tree]:
    """The result and its directional derivative along `tangents`, by dual numbers."""
    for name, values in (("primals", primals), ("tangents", tangents)):
        if not isinstance(values, (list, tuple)):
            raise ArgumentError("jvp", f"{name} = {values!r}", "Pass one for each argument: [x].")
    given, directions = tensors_of(primals), tensors_of(tangents)
    leaves, structure = trees.flatten(list(given))
    moves, other = trees.flatten(list(directions))
    if structure != other:
        raise GradientError(
            "jvp",
            f"the tangents have another structure than the primals: {outline(other)}, not "
            f"{outline(structure)}",
            "Give one tangent for each primal.",
        )
    for x, t in zip(leaves, moves, strict=True):
        if x.dtype.is_float and x.type != t.type:
            raise GradientError(
                "jvp", f"the tangent is {t.type}, the primal {x.type}", "They must be equal."
            )
    traced = trace_inside(function, given, function_name(function))
    _refuse_custom(traced.graph)
    by_name = dict(zip(traced.names, moves, strict=True))
    scope = current_scope()
    domain: Domain[Any] = (
        Symbolic(scope.builder, user_origin()) if isinstance(scope, Trace) else EAGER.oracle
    )
    inputs = {}
    for name, x in traced.inputs_for(given).items():
        moved = by_name.get(name)
        tangent = moved if moved is not None and x.dtype.is_float else None
        handles = [None if t is None else _handle(t, scope) for t in (x, tangent)]
        inputs[name] = DualNumber(*handles)
    duals = evaluate(traced.graph, inputs, Dual(domain))
    types = traced.graph.output_types
    values = [_tensor(scope, t, d.primal) for t, d in zip(types, duals, strict=True)]
    register_effects(traced.graph.outputs, values)
    slopes = [
        constant(0, t.shape, t.dtype) if d.tangent is None else _tensor(scope, t, d.tangent)
        for t, d in zip(types, duals, strict=True)
    ]
    count = traced.structure.leaves
    return traced.structure.rebuild(values[:count]), traced.structure.rebuild(slopes[:count])


def _refuse_custom(graph: Graph) -> None:
    """Forward mode differentiates a body; it cannot use a user's own backward."""
    pending = [graph]
    while pending:
        for node in pending.pop().nodes:
            call = node.attributes
            if isinstance(call, Call) and call.backward is not None:
                raise GradientError(
                    "jvp",
                    f"{call.name} has a backward of its own, which forward mode cannot use",
                    "Use td.vjp or td.grad.",
                )
            pending.extend(bodies(call))


def _handle(x: Tensor, scope: Any) -> Any:
    return x.handle if scope is EAGER else into_scope(x, scope).handle


def _tensor(scope: Any, type_: TensorType, handle: Any) -> Tensor:
    return Tensor(scope, type_, handle)


def custom_vjp(forward: Function, backward: Function) -> Function:
    """`forward` with a gradient of your own: `backward(ct, out, *inputs)` gives one per input.

    `ct` and `out` have the structure of the result. None stands for a zero gradient. The number,
    shapes and dtypes of the gradients are checked. Steps that are compiled with `verify="full"`
    compare them with the derivative.
    """

    @wraps(forward)
    def call(*arguments: Tree) -> Tree:
        given = tensors_of(arguments)
        if current_trace() is None:
            return forward(*given)
        name = function_name(forward)
        traced = trace_inside(forward, given, name)
        _refuse_closures(name, traced)
        results = traced.structure.leaves
        types = traced.graph.output_types[:results]
        gradient = _trace_backward(backward, traced, types, given, name)
        operands = [t for a in given for t in trees.flatten(a)[0]]
        values = bind(CALL, Call(traced.graph, name, backward=gradient), *operands)
        register_effects(traced.graph.outputs, values)
        return traced.structure.rebuild(values[:results])

    return call


def _refuse_closures(name: str, traced: Traced) -> None:
    if traced.outer:
        types = ", ".join(str(t.type) for t in traced.outer)
        raise GradientError(
            "custom_vjp",
            f"{name} uses tensors that are not its arguments ({types}): their gradient is lost",
            "Pass them as arguments.",
        )


def _trace_backward(
    backward: Function,
    traced: Traced,
    types: Sequence[TensorType],
    given: Sequence[Tree],
    name: str,
) -> Graph:
    """The user's backward as a graph: cotangents, results, operands to gradients by position."""
    shaped = traced.structure.rebuild(types)
    gradients: list[tuple[int, Tensor]] = []

    def checked(*parts: Tree) -> list[Tensor]:
        gradients[:] = _check_gradients(name, backward(*parts), given)
        return [g for _, g in gradients]

    with tracing(f"{name}.backward") as trace:
        leaves, structure = trees.flatten([shaped, shaped, *given])
        inputs = [trace.input(str(i), getattr(t, "type", t)) for i, t in enumerate(leaves)]
        found = [into_scope(g, trace) for g in checked(*structure.rebuild(inputs))]
        if trace.adopted:
            outer = ", ".join(str(t.type) for t, _ in trace.adopted)
            raise GradientError(
                "custom_vjp",
                f"the backward of {name} uses tensors that are not its arguments ({outer})",
                "Pass them as arguments of the forward: the backward is given those too.",
            )
        if trace.effects:
            effect = trace.effects[0]
            raise GradientError(
                "custom_vjp",
                f"the backward of {name} has the {effect.kind.value} {effect.name!r}",
                "Captures, metrics and prints belong in the forward.",
            )
        outputs = [
            Output(OutputKind.GRADIENT, str(i), g.handle)
            for (i, _), g in zip(gradients, found, strict=True)
        ]
        return trace.finish_outputs(outputs)


def _check_gradients(name: str, returned: Tree, given: Sequence[Tree]) -> list[tuple[int, Tensor]]:
    """(operand position, gradient) pairs, after checking number, shapes and dtypes."""
    parts = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(parts) != len(given):
        raise GradientError(
            "custom_vjp",
            f"the backward of {name} returns {len(parts)} gradients for {len(given)} inputs",
            "Return one per input, in order; None for an input without a gradient.",
        )
    found: list[tuple[int, Tensor]] = []
    position = 0
    for i, (part, argument) in enumerate(zip(parts, given, strict=True)):
        leaves, structure = trees.flatten(argument)
        gradients = [None] * len(leaves) if part is None else _like(name, i, part, structure)
        for x, g in zip(leaves, gradients, strict=True):
            if g is not None:
                _check_gradient(name, i, x.type, g.type)
                found.append((position, g))
            position += 1
    return found


def _like(name: str, i: int, part: Tree, structure: trees.Structure) -> list[Tensor]:
    gradients, found = trees.flatten(part)
    if found != structure:
        raise GradientError(
            "custom_vjp",
            f"gradient {i} of {name} has another structure than input {i}: {outline(found)}, not "
            f"{outline(structure)}",
            "Return it as its input came.",
        )
    return [as_tensor(g) for g in gradients]


def _check_gradient(name: str, i: int, expected: TensorType, found: TensorType) -> None:
    if expected.shape != found.shape:
        cause = f"gradient {i} of {name} has the shape {found.shape}, its input {expected.shape}"
        raise GradientError("custom_vjp", cause, "Sum it over the axes that were broadcast?")
    if expected.dtype is not found.dtype:
        cause = f"gradient {i} of {name} is {found.dtype}, its input {expected.dtype}"
        raise GradientError("custom_vjp", cause, "Cast it; integer inputs take None.")
