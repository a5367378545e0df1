"""A program's steps in the current scope: what is known while tracing is computed there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.base.errors import LoadError, TreadleError
from treadle.base.memory import memory_there, shown
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import OPERATORS, Call, Value
from treadle.interop.onnx.reader.program import (
    MOST_STEPS,
    Attribute,
    Body,
    Program,
    Reference,
    Step,
)
from treadle.interop.onnx.reader.tensors import MOST_AXES
from treadle.ir.graph import Graph
from treadle.ir.rewrite import remove_dead_code

# Elements of all values that a step whose operands are known is computed over while tracing.
FOLDED = 1 << 16


class StepError(LoadError):
    """What went wrong in a step of a file, which is named."""


class Environment:
    """Values by name; those of the bodies around are seen too."""

    def __init__(self, outer: Environment | None = None):
        self._values: dict[str, Value] = {}
        self._outer = outer

    def __setitem__(self, name: str, value: Value) -> None:
        self._values[name] = value

    def __getitem__(self, name: str) -> Value:
        scope: Environment | None = self
        while scope is not None:
            if name in scope._values:
                return scope._values[name]
            scope = scope._outer
        raise LoadError(
            "onnx", f"{name[:80]!r} is read before anything gives it", "Sort the nodes."
        )


@dataclass
class Run:
    """One run of a program, and how many steps it has taken."""

    program: Program
    steps: int = 0
    functions: list[str] = field(default_factory=list)  # that are being run

    def body(
        self,
        body: Body,
        inputs: Sequence[Value],
        outer: Environment | None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> list[Value]:
        """The outputs of a graph or function."""
        if len(inputs) > len(body.inputs):
            cause = f"{body.name!r} has {len(body.inputs)} inputs and is given {len(inputs)}"
            raise LoadError("onnx", cause)
        scope = Environment(outer)
        for name, array in body.constants.items():
            scope[name] = array
        given = [*inputs, *[None] * (len(body.inputs) - len(inputs))]
        for port, value in zip(body.inputs, given, strict=True):
            scope[port.name] = value
        for step in body.steps:
            self._step(step, scope, attributes or {})
        return [scope[port.name] for port in body.outputs]

    def spend(self, steps: int) -> None:
        """Counts steps, and refuses more than a program may take."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            cause = f"loops, functions and parts take more than {MOST_STEPS:,} steps"
            raise LoadError("onnx", cause)

    def _step(self, step: Step, scope: Environment, given: Mapping[str, Attribute]) -> None:
        self.spend(1)
        try:
            operands = [scope[name] if name else None for name in step.inputs]
            attributes = _resolved(step.attributes, given)
            function = self.program.functions.get((step.domain, step.op))
            if function is not None and not (step.domain == "" and step.op in OPERATORS):
                found = self._function(function, operands, attributes)
            else:
                found = self._operator(step, operands, attributes, scope)
            _check_results(found)
        except RecursionError as error:
            raise LoadError("onnx", f"{step.title} is nested too deeply") from error
        except TreadleError as error:
            raise _at(step, error) from error
        except Exception as error:
            # An operator of a file can be given anything: whatever it stumbles over is the file's.
            cause = f"{type(error).__name__}: {str(error)[:200]}"
            raise StepError("onnx", f"{_titled(step)} cannot be run: {cause}") from error
        if len(found) < sum(map(bool, step.outputs[len(found) :])) + len(found):
            cause = f"{_titled(step)} gives {len(found)} results, not {len(step.outputs)}"
            raise LoadError("onnx", cause)
        for name, value in zip(step.outputs, found, strict=False):
            if name:
                scope[name] = value

    def _function(
        self, function: Body, operands: Sequence[Value], attributes: Mapping[str, Attribute]
    ) -> list[Value]:
        if function.name in self.functions:
            raise LoadError("onnx", f"the function {function.name[:80]!r} calls itself")
        self.functions.append(function.name)
        found = self.body(function, operands, None, {**function.defaults, **attributes})
        self.functions.pop()
        return found

    def _operator(
        self,
        step: Step,
        operands: Sequence[Value],
        attributes: Mapping[str, Attribute],
        scope: Environment,
    ) -> list[Value]:
        def run_body(body: Body, inputs: Sequence[Value]) -> list[Value]:
            return self.body(body, inputs, scope, attributes)

        opset = self.program.opset
        call = Call(step.op, attributes, step.outputs, opset, run_body, self.spend)
        is_known = all(v is None or isinstance(v, np.ndarray) for v in operands)
        if is_known and not any(step.bodies()):
            folded = _folded(call, operands)
            if folded is not None:
                return folded
        return _listed(OPERATORS[step.op](call, *operands))


def _listed(found: Value) -> list[Value]:
    return list(found) if isinstance(found, list) else [found]


def _resolved(
    attributes: Mapping[str, Attribute], given: Mapping[str, Attribute]
) -> dict[str, Attribute]:
    """Attributes with those that the caller of a function gives; what it leaves out is left out."""
    found: dict[str, Attribute] = {}
    for name, value in attributes.items():
        if not isinstance(value, Reference):
            found[name] = value
        elif value.name in given:
            found[name] = given[value.name]
    return found


def _folded(call: Call, operands: Sequence[Value]) -> list[Value] | None:
    """Results as arrays, for operands that are; None where that is too much work."""
    if sum(v.size for v in operands if v is not None) > FOLDED:
        return None
    with isolated_tracing("constant") as trace:
        found = _listed(OPERATORS[call.op](call, *operands))
        if any(isinstance(v, tuple) for v in found):
            return None
        tensors = [v for v in found if isinstance(v, Tensor)]
        _check_results(tensors)
        graph = remove_dead_code(trace.finish(tensors))
    if _work(graph) > FOLDED:
        return None
    values = iter(evaluate_float64(graph, {}))
    return [next(values).astype(v.dtype.numpy) if isinstance(v, Tensor) else v for v in found]


def _work(graph: Graph) -> int:
    return sum(t.size for node in graph.nodes for t in node.types)


def _check_results(values: Sequence[Value]) -> None:
    for value in values:
        if not isinstance(value, (Tensor, np.ndarray)):
            continue
        if len(value.shape) > MOST_AXES:
            raise LoadError("onnx", f"a result has {len(value.shape)} axes")
        nbytes = math.prod(value.shape) * 4
        if nbytes > memory_there():
            cause = f"a result of the shape {value.shape} needs {shown(nbytes)}"
            raise LoadError("onnx", f"{cause}, and this machine has {shown(memory_there())}")


def _titled(step: Step) -> str:
    return f"{step.title[:80]} {step.name!r}" if step.name else step.title[:80]


def _at(step: Step, error: TreadleError) -> LoadError:
    """The error with the innermost step it happened in."""
    if isinstance(error, StepError):
        return error
    cause = f"{_titled(step)}: {error.operation}: {error.cause}"[:1000]
    return StepError("onnx", cause, error.remedy)
