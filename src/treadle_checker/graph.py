"""Graphs: nodes in order, read from records, each typed by the rules of `types.py`.

A record is {"name", "lines", "nodes", "outputs"}, a node [op, attributes, operands, types, line]:
an operand is [node, output] of a node before it, a type [dtype, shape], a line the position of a
text in "lines" or −1. An output is [kind, name, [node, output]]. Attributes are numbers, strings,
lists and objects; {"float": "inf"}, {"fraction": [n, d]}, {"array": [dtype, shape, base64]} and
{"graph": sha256} stand for what JSON has no form for. All ops are primitives: what has a name of
its own, as softmax has, is a call of its definition, which is a graph of the file.

What moves elements is a "move": of the first operand whose guards hold, the element at a flat index
into it, held inside it, or else a value. What sums is a "reduce_…" over further variables of
products of what is read in the same way. Variables "0", "1", … are the result's axes, then those
summed over, "flat" is the result's flat index, and ["data", "k", n] what operand k holds there,
clamped below n. What sorts is an "order": of lines, whose elements are a step apart, the first ones
and their places. Each has beside it the name of the op that it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from treadle_checker import reading
from treadle_checker.field import DTYPES, ELEMENTWISE, is_float
from treadle_checker.forms import key_of
from treadle_checker.index import read_guard, read_index
from treadle_checker.reading import Reader, Rejected, Unreadable, among, integer, need, several
from treadle_checker.types import LEAVES, Graph, Literal, Node, Read, Type, Value, infer

MOST_NODES = 2**18
KINDS = ("result", "gradient", "capture", "metric", "weight", "update", "print")

read_dtype = among(DTYPES)
_name, _int, _flag = reading.text(), integer(-(2**31), 2**40), reading.flag
_ints = several(_int)


def _type(dtype: str, shape: tuple[int, ...]) -> Type:
    found = Type(dtype, shape)
    need(len(shape) <= 32 and found.size <= reading.MOST_ELEMENTS, str(found), "a small tensor")
    return found


read_type = reading.row(_type, read_dtype, several(integer(0, 2**40)))


def read_number(given: Any) -> Any:
    """An integer, a float or a fraction."""
    if isinstance(given, (bool, int, float)):
        return given
    (kind,) = given if type(given) is dict and len(given) == 1 else [None]
    if kind == "float":
        return float(among(["inf", "-inf", "nan"])(given[kind]))
    need(kind == "fraction", given, "a number")
    whole = integer(-(10**400), 10**400)
    return reading.row(Fraction, whole, integer(1, 10**400))(given[kind])


def _literal(given: Any) -> Any:
    if type(given) is not dict or given.keys() != {"array"}:
        return read_number(given)
    as_given = several(lambda part: part, 3)(given["array"])
    type_, encoded = read_type([*as_given[:2]]), reading.text(reading.MOST_BYTES)(as_given[-1])
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise Unreadable("an array is not base64") from error
    held = {"bfloat16": "uint16", "bool": "uint8"}.get(type_.dtype, type_.dtype)
    is_held = not type_.dtype.startswith("float8")
    fits = is_held and len(data) == type_.size * np.dtype(held).itemsize
    need(fits, len(data), f"the number of bytes of {type_}")
    array = np.frombuffer(data, np.dtype(held).newbyteorder("<")).reshape(type_.shape)
    if type_.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    array = array.astype(np.float64) if is_float(type_.dtype) else array.astype(held)
    return Literal(array, type_)


# How attributes are read, by their names; "body" and "backward" are graphs of the file.
ATTRIBUTES: dict[str, Reader] = {
    **dict.fromkeys("shape over".split(), _ints),
    **dict.fromkeys("axis batch size site blocks constants carries length".split(), _int),
    **dict.fromkeys("indices step asked".split(), _int),
    **dict.fromkeys("reverse descending recompute".split(), _flag),
    "reads": several(reading.row(Read, several(read_guard, 100), read_index), 10_000),
    "name": _name, "type": read_type, "dtype": read_dtype, "value": _literal,
    "places": several(_flag, 2),
}  # fmt: skip
# The attributes of every op that a graph may have; an op that is not here is refused.
_ATTRIBUTES_OF = {
    " ".join(ELEMENTWISE): "",
    "input parameter state": "name type",
    "constant": "value type",
    "iota": "axis shape dtype",
    "cast": "dtype",
    "move reduce_sum reduce_prod reduce_max reduce_min":
        "name shape over reads indices value dtype",
    "order": "name shape step length asked descending places",
    "scatter_add": "axis size batch",
    "random_bits": "site shape blocks",
    "call": "body name recompute backward",
    "scan": "body constants carries length reverse recompute",
}  # fmt: skip
SCHEMA = {op: names.split() for ops, names in _ATTRIBUTES_OF.items() for op in ops.split()}
_known_op = among(SCHEMA)


def read_attributes(op: str, given: Any, bodies: Callable[[str], Graph]) -> dict[str, Any]:
    body = reading.record(lambda graph: bodies(graph), graph=reading.text(64))
    graphs = {"body": body, "backward": reading.maybe(body)}
    readers = {name: graphs.get(name) or ATTRIBUTES[name] for name in SCHEMA[op]}
    found: dict[str, Any] = reading.record(**readers)(given)
    return found


def _text_of(op: str, raw: Any) -> str:
    """The op and its attributes as text, or a hash of it."""
    text = op if raw == {} else f"{op} {json.dumps(raw, sort_keys=True)}"
    return text if len(text) < 500 else reading.digest(text.encode())


def read_graph(given: Any, bodies: Callable[[str], Graph], digest: str = "") -> Graph:
    """A graph whose every node is of a known op and has the types that it says it has."""
    nodes: list[Node] = []
    known: dict[str, tuple[dict[str, Any], int]] = {}  # by their text: layers repeat them

    def value(node: int, output: int) -> Value:
        inside = node < len(nodes) and output < len(nodes[node].types)
        need(inside, [node, output], "a value of a node before")
        return Value(node, output)

    def node(op: str, raw: Any, operands: Any, types: Any, line: int) -> None:
        text = _text_of(op, raw)
        if text not in known:
            read = read_attributes(op, raw, bodies)
            known[text] = read, key_of(op, read)
        attributes, key = known[text]
        inferred = infer(op, attributes, tuple([nodes[v.node].types[v.output] for v in operands]))
        if types != inferred:
            told = f"{', '.join(map(str, inferred))}, not {', '.join(map(str, types))}"
            raise Rejected(f"node {len(nodes)} of {name!r}: {op} gives {told}")
        need(line < len(lines), line, "a line")
        at = lines[line] if line >= 0 else ""
        nodes.append(Node(op, attributes, operands, types, at, key))

    read_value = reading.row(value, integer(), integer())
    every = several(lambda part: part, MOST_NODES)
    parts = reading.record(name=_name, lines=several(_name), nodes=every, outputs=every)(given)
    name, lines = parts["name"], parts["lines"]
    operands, types = several(read_value, 10_000), several(read_type, 1000)
    read_node = reading.row(node, _known_op, lambda raw: raw, operands, types, integer(-1))
    for each in parts["nodes"]:
        read_node(each)
    read_output = reading.row(reading.pair, among(KINDS), _name, read_value)
    graph = Graph(tuple(nodes), tuple(map(read_output, parts["outputs"])), name, digest)
    if len(graph.leaves) != sum(n.op in LEAVES for n in nodes):
        raise Rejected(f"two leaves of {graph.name!r} have one name")
    return graph
