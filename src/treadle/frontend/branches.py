"""`cond` and `while_loop`: what is computed on a condition that is data.

A program has no branches: both sides are computed and one is taken. Gradients are those of the side
that is taken, whatever the other one gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from treadle.base import dtypes, trees
from treadle.base.errors import ArgumentError, DTypeError, ShapeError, TraceError
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor, constant
from treadle.frontend.control import scan, unchanged
from treadle.frontend.functions.arithmetic import logical_and, logical_not, stop_gradient, where
from treadle.frontend.functions.shaping import integer_of
from treadle.frontend.scopes import EAGER, current_trace
from treadle.frontend.tensor import Operand, Tensor
from treadle.frontend.tracing import (
    Traced,
    emit,
    function_name,
    outline,
    register_effects,
    tensors_of,
    trace_region,
)
from treadle.ir.graph import OutputKind


def cond(
    pred: Operand, true_fn: Callable[..., Tree], false_fn: Callable[..., Tree], *operands: Tree
) -> Tree:
    """`true_fn(*operands)` where `pred`, a bool scalar, is true, else `false_fn(*operands)`.

    Both are computed and one is taken, and so is its gradient: NaN and infinities of the other one
    do not reach it. Random draws, captures, metrics and prints of both happen. A `pred` that is
    known when the program is traced chooses there, and only that function is run.
    """
    chosen = _predicate("cond", pred)
    for name, function in (("true_fn", true_fn), ("false_fn", false_fn)):
        if not callable(function):
            wanted = "Pass a function of the operands."
            raise ArgumentError("cond", f"{name} is {function!r}, not a function", wanted)
    given = tensors_of(operands)
    if isinstance(pred, (bool, np.bool_)) or chosen.scope is EAGER:
        return (true_fn if pred else false_fn)(*given)
    taken = trace_region(true_fn, given, function_name(true_fn))
    other = trace_region(false_fn, given, function_name(false_fn))
    _check_alike(taken, other)
    first = _guarded(taken, given, chosen)
    second = _guarded(other, given, logical_not(chosen))
    return taken.structure.rebuild(map(lambda x, y: where(chosen, x, y), first, second))


def while_loop(
    cond_fn: Callable[[Tree], Operand],
    body_fn: Callable[[Tree], Tree],
    init: Tree,
    max_iterations: int | None = None,
    recompute: bool = False,
) -> Tree:
    """state = body_fn(state) while cond_fn(state), at most `max_iterations` times; the last state.

    As many iterations are computed as there may be; after the condition has turned false the state
    stays, and the body is given the initial one. Gradients are those of the iterations up to there.
    With `recompute=True` they keep only the states, as those of `td.scan`.
    """
    bound = _bound(max_iterations)
    (state,) = tensors_of([init])
    if current_trace() is None:
        return _eager_loop(cond_fn, body_fn, state, bound)

    def loop(start: Tree) -> Tree:
        first, structure = trees.flatten(start)

        def step(carry: tuple[Tensor, list[Tensor]], _: None) -> tuple[Tree, None]:
            is_running, now = carry
            # The body is defined at the start if it is run at all, and nowhere else for certain.
            safe = [where(is_running, x, y) for x, y in zip(now, first, strict=True)]
            returned = body_fn(structure.rebuild(safe))
            new = unchanged("while_loop", "state", returned, first, structure)
            after = [where(is_running, x, y) for x, y in zip(new, now, strict=True)]
            goes_on = _predicate("while_loop", cond_fn(structure.rebuild(after)))
            return (logical_and(is_running, goes_on), after), None

        running = constant(True, (), dtypes.bool_)
        (_, last), _ = scan(step, (running, first), None, bound, recompute=recompute)
        return structure.rebuild(last)

    if bound == 0:
        return state
    return cond(_predicate("while_loop", cond_fn(state)), loop, lambda start: start, state)


def _bound(max_iterations: int | None) -> int:
    if max_iterations is None:
        raise ArgumentError(
            "while_loop",
            "there is no bound on the iterations: a program has a fixed length",
            "Give max_iterations, the most that there can be.",
        )
    bound = integer_of("while_loop", "max_iterations", max_iterations)
    if bound < 0:
        raise ArgumentError("while_loop", f"max_iterations is {bound}", "Give 0 or more.")
    return bound


def _eager_loop(
    cond_fn: Callable[[Tree], Operand], body_fn: Callable[[Tree], Tree], state: Tree, bound: int
) -> Tree:
    first, structure = trees.flatten(state)
    now = list(first)
    for _ in range(bound):
        if not bool(_predicate("while_loop", cond_fn(structure.rebuild(now)))):
            break
        returned = body_fn(structure.rebuild(now))
        now = unchanged("while_loop", "state", returned, first, structure)
    return structure.rebuild(now)


def _predicate(name: str, value: Operand) -> Tensor:
    """A condition, after checking that it is one."""
    remedy = {"cond": "td.vmap over it, or td.where", "while_loop": "td.vmap over the loop"}[name]
    found = value if isinstance(value, Tensor) else as_tensor(value)
    if found.shape != ():
        raise ShapeError(
            name,
            f"the condition is {found.type}, not a scalar",
            f"Reduce it with .all() or .any(); to choose for each element use {remedy}.",
        )
    if found.dtype is not dtypes.bool_:
        raise DTypeError(
            name, f"the condition is {found.type}, not bool", "Compare it, as in x != 0."
        )
    return found


def _check_alike(taken: Traced, other: Traced) -> None:
    """Both functions must give the same, since either may be taken."""
    if taken.structure != other.structure:
        raise ArgumentError(
            "cond",
            f"true_fn returns {outline(taken.structure)} and false_fn {outline(other.structure)}, "
            "counting tensors",
            "Return the same from both.",
        )
    types = (t.graph.output_types[: t.structure.leaves] for t in (taken, other))
    for i, (first, second) in enumerate(zip(*types, strict=True)):
        if first != second:
            error = DTypeError if first.shape == second.shape else ShapeError
            raise error(
                "cond",
                f"result {i} is {first} from true_fn and {second} from false_fn",
                "Cast or expand one of them.",
            )


def _guarded(traced: Traced, given: Sequence[Tree], is_taken: Tensor) -> list[Tensor]:
    """The results of a function whose gradients count only where it is taken.

    Where it is not, cotangents are dropped at its inputs, so that 0 · ∞ inside stays inside.
    """
    inputs = {
        name: where(is_taken, x, stop_gradient(x)) if x.dtype.is_float else x
        for name, x in traced.inputs_for(given).items()
    }
    for output in traced.graph.outputs:
        if output.kind is OutputKind.UPDATE:
            raise TraceError(
                "update",
                f"the state {output.name!r} is updated inside td.cond, whichever side is taken",
                "Return the new value from both functions, and update the state after.",
            )
    values = emit(traced.graph, inputs)
    register_effects(traced.graph.outputs, values)
    return values[: traced.structure.leaves]
