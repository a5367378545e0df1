"""`If`, `Loop` and `Scan`: bodies, run as often as is known while tracing."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.frontend.branches import cond
from treadle.frontend.coerce import as_tensor
from treadle.frontend.control import scan
from treadle.frontend.functions import shaping as s
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator
from treadle.interop.onnx.reader.program import Body

UNROLLED = 64  # iterations of a loop that are traced one by one; more are a scan
MOST = 10_000


@operator("If")
def _if(call: Call, condition: Value) -> list[Value]:
    """One branch where the condition is known, or else a choice between both."""
    if isinstance(condition, np.ndarray):
        taken = bool(call.number(condition, "the condition"))
        return call.run_body(call.body("then_branch" if taken else "else_branch"), [])

    def branch(name: str) -> Any:
        def run() -> tuple[Tensor, ...]:
            return tuple(as_tensor(v) for v in call.run_body(call.body(name), []))

        return run

    pred = s.reshape(as_tensor(condition), ())
    return list(cond(pred, branch("then_branch"), branch("else_branch")))


@operator("Loop")
def _loop(call: Call, count: Value, condition: Value, *carries: Value) -> list[Value]:
    """Iterations one by one, or many as a scan, where nothing but their number ends them."""
    body = call.body("body")
    most = None if count is None else int(call.number(count, "the number of iterations"))
    if condition is not None and not isinstance(condition, np.ndarray):
        raise call.refuse("the condition is computed from the inputs", "It must be known.")
    is_on = condition is None or bool(call.number(condition, "the condition"))
    if most is not None and most > UNROLLED and is_on and _goes_on(body):
        return _as_scan(call, body, most, carries)
    state = list(carries)
    stacks: list[list[Value]] = [[] for _ in body.outputs[1 + len(carries) :]]
    iteration = 0
    while is_on and (most is None or iteration < most):
        if iteration >= MOST:
            raise call.refuse(f"it goes on after {MOST:,} iterations")
        given = [np.array(iteration, np.int64), np.array(True), *state]
        goes_on, *results = call.run_body(body, given)
        state = results[: len(carries)]
        for stack, value in zip(stacks, results[len(carries) :], strict=True):
            stack.append(value)
        is_on = bool(call.number(goes_on, "whether it goes on"))
        iteration += 1
    if iteration == 0 and stacks:
        raise call.refuse("no iterations: what would be stacked has no shape")
    return [*state, *(s.stack(stack) for stack in stacks)]


def _goes_on(body: Body) -> bool:
    """Whether the body gives back the condition it was given, or a true constant."""
    wanted = body.outputs[0].name
    given = body.inputs[1].name if len(body.inputs) > 1 else ""
    while wanted != given:
        made = [step for step in body.steps if wanted in step.outputs]
        if len(made) != 1:
            constant = body.constants.get(wanted)
            return constant is not None and bool(constant.all())
        if made[0].op == "Constant":
            value = made[0].attributes.get("value")
            return isinstance(value, np.ndarray) and bool(value.all())
        if made[0].op != "Identity" or made[0].inputs[0] == wanted:
            return False
        wanted = made[0].inputs[0]
    return True


def _as_scan(call: Call, body: Body, count: int, carries: tuple[Value, ...]) -> list[Value]:
    if count > 1_000_000:
        raise call.refuse(f"{count:,} iterations")
    first = tuple(as_tensor(v) for v in carries)

    def step(state: tuple[Tensor, ...], index: Tensor) -> tuple[Any, Any]:
        _, *results = call.run_body(body, [index, np.array(True), *state])
        tensors = [as_tensor(v) for v in results]
        return tuple(tensors[: len(first)]), tuple(tensors[len(first) :])

    last, stacked = scan(step, first, s.iota((count,), 0, dtypes.int64))
    return [*last, *stacked]


@operator("Scan")
def _scan(call: Call, *operands: Value) -> list[Value]:
    body, scanned = call.body("body"), call.integer("num_scan_inputs")
    kept = len(operands) - scanned
    stacked = len(body.outputs) - kept
    if scanned < 1 or kept < 0 or stacked < 0:
        raise call.refuse(f"{scanned} of {len(operands)} operands are scanned")
    rows = [as_tensor(v) for v in operands[kept:]]
    in_axes = call.integers("scan_input_axes", (0,) * scanned)
    in_ways = call.integers("scan_input_directions", (0,) * scanned)
    out_axes = call.integers("scan_output_axes", (0,) * stacked)
    out_ways = call.integers("scan_output_directions", (0,) * stacked)
    if len(in_axes) != scanned or len(in_ways) != scanned:
        raise call.refuse("axes and directions are not as many as inputs")
    if len(out_axes) != stacked or len(out_ways) != stacked:
        raise call.refuse("axes and directions are not as many as outputs")
    rows = [
        s.moveaxis(r, call.axis(axis, r.ndim), 0) for r, axis in zip(rows, in_axes, strict=True)
    ]
    rows = [s.flip(r, 0) if way else r for r, way in zip(rows, in_ways, strict=True)]
    first = tuple(as_tensor(v) for v in operands[:kept])

    def step(state: tuple[Tensor, ...], row: tuple[Tensor, ...]) -> tuple[Any, Any]:
        results = [as_tensor(v) for v in call.run_body(body, [*state, *row])]
        return tuple(results[:kept]), tuple(results[kept:])

    last, found = scan(step, first, tuple(rows))
    outputs = [s.flip(y, 0) if way else y for y, way in zip(found, out_ways, strict=True)]
    axes = [call.axis(axis, y.ndim) for axis, y in zip(out_axes, outputs, strict=True)]
    return [*last, *(s.moveaxis(y, 0, axis) for y, axis in zip(outputs, axes, strict=True))]
