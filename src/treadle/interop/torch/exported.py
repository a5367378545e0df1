"""`torch.export` of a module, and its graph as a `Program`: the only part that walks PyTorch's."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from treadle.base.dtypes import BY_NAME, DType
from treadle.base.errors import ArgumentError
from treadle.frontend.branches import cond
from treadle.interop.torch.program import Call, Known, Program, Ref
from treadle.interop.torch.rows.all import ROWS
from treadle.interop.torch.rows.table import Row

# Where a tensor is and how it lies in memory is Treadle's own matter.
LEFT_OUT = frozenset({"device", "layout", "pin_memory", "memory_format", "generator"})
MOST_ROUNDS = 3  # of decompositions whose results are decomposed again
NO_GRAD = "higher_order.wrap_with_set_grad_enabled"


def export(
    module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], dynamic: Any
) -> Any:
    """The functional program of a module in its present mode, in ops that have rows if it can be.

    Ops without a row are decomposed by PyTorch's own tables; those with one stay whole.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.export.export(
                module, arguments, dict(keywords) or None, dynamic_shapes=dynamic
            )
        except Exception as error:  # whatever the model's own code raises
            way = "training" if module.training else "evaluation"
            cause = f"torch.export refused {type(module).__name__} in {way}: {_first_lines(error)}"
            remedy = (
                "torch.export.export(module, inputs) must work: see PyTorch's own message. "
                'mode="eval" leaves training out.'
            )
            raise ArgumentError("from_module", cause, remedy) from error
        _detach_without_gradient(found)
        table: Any = torch.export.default_decompositions()
        for op in list(table.keys()):
            if name_of(op) in ROWS:
                table.pop(op)
        found = found.run_decompositions(table)
        for _ in range(MOST_ROUNDS):
            more = _further(_without_rows(found))
            if not more:
                break
            found = found.run_decompositions(more)
    return found


def _detach_without_gradient(found: Any) -> None:
    """Results of what is inside `torch.no_grad()` are detached: decomposing forgets what it was."""
    import torch

    for module in _modules(found):
        for node in module.graph.nodes:
            is_call = node.op == "call_function"
            is_region = is_call and name_of(node.target) == NO_GRAD
            if not is_region or node.args[0]:
                continue
            inner = getattr(module, node.args[1].target)
            (end,) = (n for n in inner.graph.nodes if n.op == "output")
            with inner.graph.inserting_before(end):
                results = [_detached(inner.graph, r, torch) for r in _listed(end.args[0])]
            end.args = (tuple(results),)
            inner.recompile()


def _detached(graph: Any, value: Any, torch: Any) -> Any:
    kept = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    if not isinstance(kept, torch.Tensor) or not kept.is_floating_point():
        return value
    new = graph.call_function(torch.ops.aten.detach.default, (value,))
    new.meta = dict(value.meta)
    return new


def _further(ops: Sequence[Any]) -> dict[Any, Any]:
    """Decompositions that end in ATen's ops; others end in primitives that have no rows."""
    import torch

    found = torch._decomp.get_decompositions(ops)
    return {op: f for op, f in found.items() if f.__module__.startswith("torch._decomp")}


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:400]


def _modules(found: Any) -> Iterator[Any]:
    """The graph module of a program and those inside of it."""
    stack = [found.graph_module]
    while stack:
        module = stack.pop()
        yield module
        stack += [m for _, m in module.named_children() if _has_graph(m)]


def _has_graph(module: object) -> bool:
    import torch

    return isinstance(module, torch.fx.GraphModule)


def _without_rows(found: Any) -> list[Any]:
    nodes = (n for m in _modules(found) for n in m.graph.nodes if n.op == "call_function")
    return list(dict.fromkeys(n.target for n in nodes if name_of(n.target) not in KNOWN))


def name_of(target: Any) -> str:
    """The name of a row: without "aten.", and of Python's functions by where they come from."""
    import torch

    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    module = getattr(target, "__module__", "")
    name = getattr(target, "__name__", str(target))
    return f"operator.{name}" if module == "_operator" else f"python.{name}"


# Ops that take programs


def _cond(predicate: Any, yes: Program, no: Program, operands: Sequence[Any] = ()) -> list[Any]:
    if isinstance(predicate, bool):
        return (yes if predicate else no).run(list(operands))
    return list(
        cond(predicate, lambda *x: tuple(yes.run(x)), lambda *x: tuple(no.run(x)), *operands)
    )


HIGHER: dict[str, Row] = {
    "higher_order.cond": _cond,
}
KNOWN: dict[str, Row] = {**ROWS, **HIGHER}


# The graph


@dataclass
class Refused:
    """What has no counterpart here: ops and dtypes, and how often."""

    ops: Counter[str] = field(default_factory=Counter)

    def check(self, name: str) -> None:
        """One error that lists everything."""
        if not self.ops:
            return
        listed = ", ".join(f"{op} ({n} ×)" for op, n in self.ops.most_common())
        count = sum(self.ops.values())
        raise ArgumentError(
            "from_module",
            f"{name} has {count} nodes without a counterpart: {listed}",
            "Write the model without them, or those parts of it as a Treadle module.",
        )


def program_of(graph_module: Any, refused: Refused) -> Program:
    """The graph as calls of rows; what has none is noted in `refused`."""
    places: dict[Any, Any] = {}
    calls: list[Call] = []
    inputs = 0
    results: tuple[Any, ...] = ()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            places[node] = Ref(inputs)
            inputs += 1
        elif node.op == "get_attr":
            inner = getattr(graph_module, node.target)
            places[node] = program_of(inner, refused) if _has_graph(inner) else _plain(inner, {})
        elif node.op == "call_function":
            call = _call(node, places, refused)
            if call is not None:
                calls.append(call)
            places[node] = Ref(inputs + len(calls) - 1)
        elif node.op == "output":
            given = node.args[0]
            results = tuple(_plain(r, places) for r in _listed(given))
    return Program(inputs, tuple(calls), results)


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [given]


def _call(node: Any, places: Mapping[Any, Any], refused: Refused) -> Call | None:
    name = name_of(node.target)
    row = KNOWN.get(name)
    if row is None or (name == "as_strided.default" and not _has_no_gaps(node.args[0])):
        refused.ops[str(node.target)] += 1
        return None
    try:
        known = _known(node.meta.get("val"))
        arguments, keywords = _by_schema(node)
        return Call(
            name,
            row,
            tuple(_plain(a, places) for a in arguments),
            {k: _plain(v, places) for k, v in keywords.items() if k not in LEFT_OUT},
            known,
        )
    except _NoSuchDTypeError as error:
        refused.ops[f"{name} of {error}"] += 1
        return None


def _has_no_gaps(node: Any) -> bool:
    """Whether a tensor's elements lie in order, as strides of it are understood here."""
    value = node.meta.get("val")
    return value is not None and value.is_contiguous() and value.storage_offset() == 0


def _by_schema(node: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position as far as the op's schema has them so, the rest by name."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.args), dict(node.kwargs)
    given, keywords = list(node.args), dict(node.kwargs)
    positional = [a for a in schema.arguments if not a.kwarg_only]
    last = max((i for i, a in enumerate(positional) if a.name in keywords), default=-1)
    for argument in positional[len(given) : last + 1]:
        given.append(keywords.pop(argument.name, argument.default_value))
    return given, keywords


class _NoSuchDTypeError(Exception):
    """A dtype of PyTorch's that Treadle does not have."""


def dtype_of(dtype: Any) -> DType:
    name = str(dtype).removeprefix("torch.")
    if name not in BY_NAME:
        raise _NoSuchDTypeError(str(dtype))
    return BY_NAME[name]


def _plain(value: Any, places: Mapping[Any, Any]) -> Any:
    """An argument without anything of PyTorch's."""
    import torch

    if isinstance(value, torch.fx.Node):
        return places.get(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v, places) for v in value]
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format, torch.Generator)):
        return None
    return value


def _known(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return Known(tuple(map(_size, value.shape)), dtype_of(value.dtype))
    if isinstance(value, (list, tuple)):
        return tuple(map(_known, value))
    return None


def _size(n: Any) -> int | str:
    return n if isinstance(n, int) else str(n)


def known_input(value: Any) -> Any:
    """The type of an input, or None for one that is no tensor."""
    return _known(value)


@contextmanager
def in_mode(module: Any, training: bool) -> Iterator[None]:
    """The module in training or evaluation, and afterwards as it was.

    A module that is in training keeps the parts that were put into evaluation.
    """
    before = {part: part.training for part in module.modules()}
    try:
        if not training or not module.training:
            module.train(training)
        yield
    finally:
        for part, was in before.items():
            part.training = was
