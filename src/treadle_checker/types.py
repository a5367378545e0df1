"""What graphs are made of, and the types that ops give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from treadle_checker.field import DTYPES, Array, is_float
from treadle_checker.reading import MOST_ELEMENTS, Rejected

LEAVES = ("input", "parameter", "state")


class Type(NamedTuple):
    """A dtype and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Value(NamedTuple):
    """One output of one node."""

    node: int
    output: int = 0


class Literal(NamedTuple):
    """An array of a constant; floats are float64, exactly."""

    array: Array
    type: Type


@dataclass(frozen=True, slots=True)
class Node:
    """One use of an op. `key` is the op and its attributes as text: equal nodes have equal keys."""

    op: str
    attributes: Mapping[str, Any]
    operands: tuple[Value, ...]
    types: tuple[Type, ...]
    line: str = ""
    key: str = ""


@dataclass(frozen=True)
class Graph:
    """Nodes in order, and named values that leave it."""

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str, Value], ...]  # kind, name, value
    name: str = "graph"
    digest: str = field(default="", compare=False)

    def type_of(self, value: Value) -> Type:
        return self.nodes[value.node].types[value.output]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Positions of the `input` nodes: the arguments of a body, in order."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op == "input")

    @cached_property
    def leaves(self) -> dict[str, int]:
        return {n.attributes["name"]: i for i, n in enumerate(self.nodes) if n.op in LEAVES}

    @cached_property
    def ops(self) -> frozenset[str]:
        """Those of bodies too."""
        bodies = [body.ops for node in self.nodes for body in bodies_of(node)]
        return frozenset(n.op for n in self.nodes).union(*bodies)

    @property
    def output_types(self) -> tuple[Type, ...]:
        return tuple(self.type_of(v) for _, _, v in self.outputs)


def bodies_of(node: Node) -> Iterator[Graph]:
    if node.op in ("call", "scan"):
        yield node.attributes["body"]


# Types

Shape = tuple[int, ...]
Types = tuple[Type, ...]


def infer(op: str, attributes: Mapping[str, Any], operands: Types) -> Types:
    """The types of an op's results; Rejected if the operands or attributes do not fit."""
    try:
        found = _elementwise(op, operands) or _of_one(op, attributes, *operands)
        found = found or _of_several(op, attributes, *operands)
    except (ValueError, IndexError, TypeError, KeyError, ArithmeticError) as error:
        given, told = ", ".join(map(str, operands)), str(dict(attributes))[:200]
        raise Rejected(f"{op} of {given} with {told}: {error}") from error
    types = tuple(Type(*t) for t in found)
    for t in types:
        if len(t.shape) > 32 or min(t.shape, default=0) < 0 or t.size > MOST_ELEMENTS:
            raise Rejected(f"{op} gives a tensor of {t.size} elements")
    return types


def need(*conditions: object) -> None:
    if not all(conditions):
        raise ValueError("the operands do not fit")


def is_integer(dtype: str) -> bool:
    return not is_float(dtype) and dtype != "bool"


def _is_number(dtype: str) -> bool:
    return dtype != "bool"


# Elementwise ops: how many operands, of which dtypes, and the result's where it is another one.
_KINDS: dict[str, tuple[int, Callable[[str], bool], str]] = {
    "neg abs sign": (1, _is_number, ""),
    "floor exp log sqrt rsqrt sin cos tanh erf shard_sum": (1, is_float, ""),
    "not": (1, lambda dtype: not is_float(dtype), ""),
    "stop_gradient": (1, lambda dtype: True, ""),
    "add sub mul floordiv mod max min": (2, _is_number, ""),
    "div pow atan2": (2, is_float, ""),
    "eq": (2, lambda dtype: True, "bool"),
    "lt le": (2, _is_number, "bool"),
    "and or xor": (2, lambda dtype: not is_float(dtype), ""),
}
ELEMENTWISE = {op: kind for ops, kind in _KINDS.items() for op in ops.split()}


Found = Sequence[tuple[str, Shape]] | None


def _elementwise(op: str, xs: Types) -> Found:
    if op == "where":
        c, x, y = xs
        need(c == Type("bool", x.shape), x == y)
        return (x,)
    if op not in ELEMENTWISE:
        return None
    arity, accepts, result = ELEMENTWISE[op]
    need(len(xs) == arity, len(set(xs)) == 1, accepts(xs[0].dtype))
    return (Type(result or xs[0].dtype, xs[0].shape),)


def _of_one(op: str, a: Any, *xs: Type) -> Found:
    """Ops of no operand, or of one."""
    if len(xs) != (op not in (*LEAVES, "constant", "iota")):
        return None
    x = xs[0] if xs else Type("", ())
    (dtype, shape), rank = x, len(x.shape)
    axis, axes = a.get("axis", 0), a.get("axes", ())
    match op:
        case "input" | "parameter" | "state":
            return [a["type"]]
        case "constant":
            need(_holds(a["type"], a["value"]))
            return [a["type"]]
        case "iota":
            need(0 <= axis < len(a["shape"]), a["dtype"] != "bool")
            return [(a["dtype"], a["shape"])]
        case "cast":
            return [(a["dtype"], shape)]
        case "reduce_sum" | "reduce_prod" | "reduce_max" | "reduce_min":
            need(_are_axes(axes, rank), dtype != "bool")
            return [(dtype, tuple(n for i, n in enumerate(shape) if i not in axes))]
        case "argmax" | "argmin" | "cumsum" | "sort" | "top_k":
            need(0 <= axis < rank, dtype != "bool")
            around = shape[:axis], shape[axis + 1 :]
            if op == "top_k":
                need(0 <= a["k"] <= shape[axis])
                shape = (*around[0], a["k"], *around[1])
            if op.startswith("arg"):
                need(shape[axis] > 0)
                return [("int32", around[0] + around[1])]
            return [(dtype, shape), ("int32", shape)][: 1 if op == "cumsum" else 2]
        case "reshape":
            need(min(a["shape"], default=0) >= 0, math.prod(a["shape"]) == x.size)
            return [(dtype, a["shape"])]
        case "permute":
            need(sorted(axes) == list(range(rank)))
            return [(dtype, tuple(shape[i] for i in axes))]
        case "broadcast":
            need(_are_axes(axes, len(a["shape"])))
            need(all(a["shape"][i] == n for i, n in zip(axes, shape, strict=True)))
            return [(dtype, a["shape"])]
        case "slice":
            bounds = list(zip(a["starts"], a["stops"], a["strides"], shape, strict=True))
            need(all(0 <= b <= e <= n and s >= 1 for b, e, s, n in bounds))
            return [(dtype, tuple(-(-(e - b) // s) for b, e, s, _ in bounds))]
        case "pad":
            parts = list(zip(shape, a["low"], a["high"], a["interior"], strict=True))
            need(all(min(part) >= 0 for part in parts), not isinstance(a["value"], Literal))
            grown = (lo + n + max(n - 1, 0) * gap + hi for n, lo, hi, gap in parts)
            return [(dtype, tuple(grown))]
        case "flip":
            need(all(0 <= i < rank for i in axes))
            return [x]
        case "window":
            return [(dtype, windowed(a, shape))]
        case "unwindow":
            need(shape == windowed(a["window"], a["shape"]))
            return [(dtype, a["shape"])]
        case "random_bits":
            need(x == Type("uint32", (6,)), 0 <= a["site"] < 2**16)
            return [("uint32", a["shape"])]
    return None


def _are_axes(axes: Shape, rank: int) -> bool:
    return list(axes) == sorted(set(axes)) and all(0 <= i < rank for i in axes)


def _holds(type_: Type, value: Any) -> bool:
    """Whether a constant is one of a type."""
    if isinstance(value, Literal):
        return value.type == type_
    if not is_integer(type_.dtype):
        return isinstance(float(value), float)
    bits, unsigned = DTYPES[type_.dtype], type_.dtype.startswith("u")
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return math.isfinite(value) and bool(low <= value <= high) and value % 1 == 0


def window_starts(a: Any, shape: Shape) -> Shape:
    """How many windows there are along each windowed axis."""
    axes, parts = a["axes"], (a["sizes"], a["strides"], a["dilations"])
    need(_are_axes(axes, len(shape)), all(min(part, default=1) >= 1 for part in parts))
    rows = zip(axes, *parts, strict=True)
    found = tuple((shape[i] - (k - 1) * d - 1) // s + 1 for i, k, s, d in rows)
    need(min(found, default=1) >= 1)
    return found


def windowed(a: Any, shape: Shape) -> Shape:
    counts = dict(zip(a["axes"], window_starts(a, shape), strict=True))
    return (*(counts.get(i, n) for i, n in enumerate(shape)), *a["sizes"])


def labels(spec: str) -> tuple[str, str, str]:
    """The axes of both operands of a contraction and of its result."""
    operands, result = spec.split("->")
    x, y = operands.split(",")
    return x, y, result


def _of_several(op: str, a: Any, *xs: Type) -> Sequence[tuple[str, Shape]]:
    if op in ("call", "scan"):
        return _with_body(op, a, xs)
    (dtype, shape), second, third = [*xs, Type("", ()), Type("", ())][:3]
    match op:
        case "concat":
            axis = a["axis"]
            need(0 <= axis < len(shape), all(len(x.shape) == len(shape) for x in xs))
            need(len({(x.dtype, x.shape[:axis], x.shape[axis + 1 :]) for x in xs}) == 1)
            total = sum(x.shape[axis] for x in xs)
            return [(dtype, (*shape[:axis], total, *shape[axis + 1 :]))]
        case "dynamic_slice":
            need(len(xs) == 2, _are_starts(second, shape))
            need(all(0 <= s <= n for s, n in zip(a["sizes"], shape, strict=True)))
            return [(dtype, a["sizes"])]
        case "dynamic_update_slice":
            need(len(xs) == 3, _are_starts(third, shape), second.dtype == dtype)
            need(all(u <= n for u, n in zip(second.shape, shape, strict=True)))
            return [(dtype, shape)]
        case "gather":
            axis, batch = a["axis"], a["batch"]
            need(len(xs) == 2, is_integer(second.dtype), 0 <= batch <= axis < len(shape))
            need(batch <= len(second.shape), shape[:batch] == second.shape[:batch])
            return [(dtype, shape[:axis] + second.shape[batch:] + shape[axis + 1 :])]
        case "scatter_add":
            axis, batch, chosen = a["axis"], a["batch"], len(second.shape) - a["batch"]
            need(len(xs) == 2, is_integer(second.dtype), dtype != "bool", 0 <= batch <= axis)
            need(chosen >= 0, axis + chosen <= len(shape), a["size"] >= 0)
            need(shape[:batch] + shape[axis : axis + chosen] == second.shape)
            return [(dtype, (*shape[:axis], a["size"], *shape[axis + chosen :]))]
        case "contract":
            need(len(xs) == 2)
            return [_contracted(a, *xs)]
    raise ValueError("the operands do not fit")


def _are_starts(x: Type, shape: Shape) -> bool:
    return x.shape == (len(shape),) and is_integer(x.dtype)


def _contracted(a: Any, x: Type, y: Type) -> Type:
    lx, ly, lr = labels(a["spec"])
    need(all(len(set(part)) == len(part) for part in (lx, ly, lr)))
    need(all((c in lx) + (c in ly) + (c in lr) >= 2 for c in lx + ly + lr))
    eight = DTYPES[x.dtype] == DTYPES[y.dtype] == 8 and is_float(x.dtype) and is_float(y.dtype)
    need(x.dtype == y.dtype or eight, is_float(x.dtype) == is_float(a["dtype"]))
    need(x.dtype != "bool", DTYPES[a["dtype"]] >= (16 if eight else DTYPES[x.dtype]))
    need(is_float(x.dtype) or x.dtype.startswith("u") == a["dtype"].startswith("u"))
    sizes = dict(zip(lx, x.shape, strict=True))
    need(all(sizes.setdefault(c, n) == n for c, n in zip(ly, y.shape, strict=True)))
    return Type(a["dtype"], tuple(sizes[c] for c in lr))


def _with_body(op: str, a: Any, operands: Types) -> list[Any]:
    body = a["body"]
    taken, given = tuple(body.nodes[i].types[0] for i in body.inputs), body.output_types
    if op == "call":
        need(operands == taken)
        return list(given)
    constants, carries, length = a["constants"], a["carries"], a["length"]
    need(constants >= 0, carries >= 0, 0 <= length < 2**31)
    whole, slices = operands[: constants + carries], operands[constants + carries :]
    need(len(whole) == constants + carries, all(x.shape[:1] == (length,) for x in slices))
    need(whole + tuple(Type(x.dtype, x.shape[1:]) for x in slices) == taken)
    need(given[:carries] == whole[constants:])
    return [*given[:carries], *((y.dtype, (length, *y.shape)) for y in given[carries:])]
