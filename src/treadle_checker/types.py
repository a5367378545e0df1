"""What graphs are made of, and the types that ops give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from treadle_checker.budget import CALL
from treadle_checker.field import DTYPES, Array, is_float
from treadle_checker.index import Atom, Guard, Index
from treadle_checker.reading import MOST_ELEMENTS, Rejected

LEAVES = ("input", "parameter", "state")
Shape = tuple[int, ...]


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


class Read(NamedTuple):
    """An operand's element by its flat index, and the bounds within which it is read."""

    guards: tuple[Guard, ...]
    address: Index


class Literal(NamedTuple):
    """An array of a constant; floats are float64, exactly."""

    array: Array
    type: Type


class Node(NamedTuple):
    """One use of an op. `key` is a number that equal uses of an op have in common (`forms.py`)."""

    op: str
    attributes: Mapping[str, Any]
    operands: tuple[Value, ...]
    types: tuple[Type, ...]
    line: str = ""
    key: int = -1


Output = tuple[str, str, Value]  # kind, name, value


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in order, and named values that leave it."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    name: str = "graph"
    digest: object = field(default="", compare=False)  # equal for equal graphs

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

    @cached_property
    def work(self) -> int:
        """Operations that all elements of all nodes take, about, and not more."""
        total = 0
        for node in self.nodes:
            size, terms = (
                sum(t.size for t in node.types),
                math.prod(node.attributes.get("over", ())),
            )
            times = node.attributes.get("length", 1) if node.op == "scan" else 1
            total += CALL + size * (2 + terms // 16)
            total += times * sum(body.work for body in bodies_of(node))
        return total

    def made_of(self, given: Iterable[int]) -> set[int]:
        """Some nodes, and those that are computed of them."""
        found = set(given)
        for i, node in enumerate(self.nodes):
            if any(v.node in found for v in node.operands):
                found.add(i)
        return found

    @property
    def output_types(self) -> tuple[Type, ...]:
        return tuple(self.type_of(v) for _, _, v in self.outputs)


def is_view(node: Node) -> bool:
    """Whether every element is one of the only operand's."""
    reads = node.attributes.get("reads", ())
    return node.op == "move" and len(reads) == 1 and not reads[0].guards


def is_identity(node: Node) -> bool:
    """Whether every element is the operand's own."""
    if not is_view(node) or len(node.operands) != 1:
        return False
    address, shape = node.attributes["reads"][0].address, node.types[0].shape
    own: dict[str | Atom, int] = {}
    for i, n in enumerate(shape):
        if n != 1:
            own[str(i)] = math.prod(shape[i + 1 :])
    found = {atom: factor for factor, atom in address.terms}
    return not address.offset and found in (own, {"flat": 1})


def bodies_of(node: Node) -> Iterator[Graph]:
    if node.op in ("call", "scan"):
        yield node.attributes["body"]


Types = tuple[Type, ...]


def infer(op: str, attributes: Mapping[str, Any], operands: Types) -> Types:
    """The types of an op's results; Rejected if the operands or attributes do not fit."""
    try:
        found = _results(op, attributes, operands)
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


def _results(op: str, a: Any, xs: Types) -> Sequence[tuple[str, Shape]]:
    if op in ELEMENTWISE:
        arity, accepts, result = ELEMENTWISE[op]
        need(len(xs) == arity, len(set(xs)) == 1, accepts(xs[0].dtype))
        return [(result or xs[0].dtype, xs[0].shape)]
    if op in ("call", "scan"):
        return _with_body(op, a, xs)
    if op == "move" or op.startswith("reduce_"):
        return _of_reads(op, a, xs)
    if op == "adjoint":  # of an operand of what reads; no file has it
        need(xs[1:], xs[0] == a["of"].types[0])
        return [xs[1 + a["which"]]]
    if op == "where":
        condition, x, y = xs
        need(condition == Type("bool", x.shape), x == y)
        return [x]
    if op == "scatter_add":
        return _scattered(a, *xs)
    if op in (*LEAVES, "constant", "iota"):
        need(not xs, op != "constant" or _holds(a["type"], a["value"]))
        need(op != "iota" or (0 <= a["axis"] < len(a["shape"]) and a["dtype"] != "bool"))
        return [a["type"] if "type" in a else (a["dtype"], a["shape"])]
    (x,) = xs
    if op == "cast":
        return [(a["dtype"], x.shape)]
    if op == "random_bits":
        need(x == Type("uint32", (6,)), 0 <= a["site"] < 2**16)
        return [("uint32", a["shape"])]
    need(op == "order", min(a["step"], a["length"], a["asked"]) >= 0, x.dtype != "bool")
    need(x.size * a["asked"] == math.prod(a["shape"]) * a["length"])
    return [("int32" if is_place else x.dtype, a["shape"]) for is_place in a["places"]]


def _of_reads(op: str, a: Any, xs: Types) -> Sequence[tuple[str, Shape]]:
    count = len(xs) - a["indices"]
    need(0 < count <= len(xs) == len(a["reads"]), min(a["over"], default=0) >= 0)
    need(all(is_integer(x.dtype) for x in xs[count:]))
    dtypes = {a["dtype"], *(x.dtype for x in xs[:count])}
    if op == "move":
        need(not a["over"], len(dtypes) == 1)
    else:
        need(len(set(map(is_float, dtypes))) == 1, "bool" not in dtypes)
    return [(a["dtype"], a["shape"])]


def _scattered(a: Any, x: Type, chosen: Type) -> Sequence[tuple[str, Shape]]:
    axis, batch, count = a["axis"], a["batch"], len(chosen.shape) - a["batch"]
    need(is_integer(chosen.dtype), x.dtype != "bool", 0 <= batch <= axis, a["size"] >= 0)
    need(count >= 0, axis + count <= len(x.shape))
    need(x.shape[:batch] + x.shape[axis : axis + count] == chosen.shape)
    return [(x.dtype, (*x.shape[:axis], a["size"], *x.shape[axis + count :]))]


def _holds(type_: Type, value: Any) -> bool:
    """Whether a constant is one of a type."""
    if isinstance(value, Literal):
        return value.type == type_
    if not is_integer(type_.dtype):
        return isinstance(float(value), float)
    bits, unsigned = DTYPES[type_.dtype], type_.dtype.startswith("u")
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return math.isfinite(value) and bool(low <= value <= high) and value % 1 == 0


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
