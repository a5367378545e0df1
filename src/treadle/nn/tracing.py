"""A model and a function of it as a graph: parameters and states are leaves with their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError, TraceError
from treadle.base.trees import Structure, Tree
from treadle.frontend.binding import Binding, bound
from treadle.frontend.coerce import as_tensor
from treadle.frontend.scopes import Trace, into_scope, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import function_name, spec_of
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import PARAMETER, STATE
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.nn.init import literal
from treadle.nn.module import Declaration, Module, Parameter

INPUT_PREFIX = "batch:"


class Values(Module):
    """A tree of modules, parameters and arrays as one module; arrays become parameters."""

    def __init__(self, tree: Tree):
        leaves, structure = trees.flatten(tree)
        self.tree = structure.rebuild(
            _part(path, leaf) for path, leaf in zip(trees.paths(tree), leaves, strict=True)
        )

    def _parts(self) -> list[tuple[str, Any]]:
        parts = trees.children(self.tree)
        return [("tree", self.tree)] if parts is None else [(str(k), part) for k, part in parts]


def _part(path: str, leaf: object) -> object:
    if isinstance(leaf, (Module, Declaration)):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMmc":
        remedy = "A model is made of modules, parameters or arrays."
        if isinstance(leaf, type) and issubclass(leaf, Module):
            remedy = f"That is a class. Make one: {leaf.__name__}(...)."
        raise ArgumentError("model", f"{path or 'it'} is {leaf!r}", remedy)
    dtype = spec_of(leaf).dtype
    return Parameter(array.shape, literal(array), requires_grad=dtype.is_float, dtype=dtype)


def as_module(model: object) -> Module:
    """A module from one, or from a tree of modules, parameters and arrays."""
    return model if isinstance(model, Module) else Values(model)


def as_argument(model: Module) -> object:
    """What a loss or forward function is called with."""
    return model.tree if isinstance(model, Values) else model


@dataclass(frozen=True, slots=True)
class Inputs:
    """The types of a batch, by leaf name, and the tree it comes in."""

    types: tuple[tuple[str, Any], ...]  # (name, TensorType)
    structure: Structure

    @staticmethod
    def of(batch: Tree) -> Inputs:
        leaves, structure = trees.flatten(batch)
        for leaf in leaves:
            if isinstance(leaf, (bool, int, float)):
                raise ArgumentError(
                    "compile",
                    f"the batch has the Python number {leaf!r} in it",
                    "Describe an input by td.Spec(shape, dtype), or give an example array.",
                )
        names = [f"{INPUT_PREFIX}{path}" for path in trees.paths(batch)]
        return Inputs(tuple(zip(names, map(spec_of, leaves), strict=True)), structure)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.types]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A graph over a model's declarations and a batch, and the structure of its result."""

    graph: Graph
    structure: Structure


Finish = Callable[[Trace, Any], list[Tensor]]


def trace_model(
    model: Module,
    function: Callable[..., Any],
    inputs: Inputs,
    training: bool,
    finish: Finish | None = None,
) -> TracedModel:
    """`function(model, batch)` as a graph. `finish` turns its result into the graph's results."""
    with isolated_tracing(function_name(function)) as trace:
        declarations = model.declarations()
        tensors = {
            id(d): trace.leaf(PARAMETER if isinstance(d, Parameter) else STATE, n, d.type)
            for n, d in declarations.items()
        }
        names = {id(d): n for n, d in declarations.items()}
        batch = inputs.structure.rebuild(trace.input(n, t) for n, t in inputs.types)
        with bound(Binding(tensors, names, training)):
            result = function(as_argument(model), batch)
            if finish is not None:
                return TracedModel(
                    remove_dead_code(trace.finish(finish(trace, result))), trees.LEAF
                )
            values, structure = trees.flatten(result)
            results = [as_result(trace, v) for v in values]
        return TracedModel(remove_dead_code(trace.finish(results)), structure)


def as_result(trace: Trace, value: object) -> Tensor:
    try:
        return into_scope(as_tensor(value), trace)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TraceError(
            trace.title,
            f"it returns {value!r}, which is not a tensor",
            "Return tensors or trees of them.",
        ) from error


def smaller_inputs(inputs: Inputs) -> list[Inputs]:
    """Batches of a few elements along every axis, of two along the first, and as they are."""

    def cut(most: tuple[int, ...]) -> Inputs:
        return replace(inputs, types=tuple((name, _cut(t, most)) for name, t in inputs.types))

    return [cut((2, 5, 5, 5, 5)), cut((2,)), inputs]


def _cut(type_: TensorType, most: tuple[int, ...]) -> TensorType:
    pairs = zip_longest(type_.shape, most[: type_.rank])
    return type_.with_shape(tuple(n if m is None else min(n, m) for n, m in pairs))


def count_parameters(model: Module) -> int:
    """Elements of all parameters."""
    return sum(p.type.size for p in model.parameters())
