"""Graphs: nodes in order, read from records, each typed by the rules of `types.py`.

A record is {"name", "lines", "nodes", "outputs"}, a node [op, attributes, operands, types, line]:
an operand is [node, output] of a node before it, a type [dtype, shape], a line the position of a
text in "lines" or −1. An output is [kind, name, [node, output]]. Attributes are numbers, strings,
lists and objects; {"float": "inf"}, {"fraction": [n, d]}, {"array": [dtype, shape, base64]} and
{"graph": sha256} stand for what JSON has no form for.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from treadle_checker import reading
from treadle_checker.composites import infer
from treadle_checker.field import DTYPES, is_float
from treadle_checker.reading import Rejected, Unreadable
from treadle_checker.values import KINDS, LEAVES, Graph, Literal, Node, Type, Value

MOST_NODES = 2**18


# Readers of attributes, by what they are.

Bodies = Callable[[str], Graph]


def _ints(value: object, _: Bodies) -> tuple[int, ...]:
    return reading.integers(value, -(2**31), 2**40, "an attribute")


def _int(value: object, _: Bodies) -> int:
    return reading.integer(value, -(2**31), 2**40, "an attribute")


def _pairs(value: object, _: Bodies) -> tuple[tuple[int, ...], ...]:
    return tuple(reading.integers(v, 0, 2**31) for v in reading.items(value, 8))


def _name(value: object, _: Bodies) -> str:
    return reading.string(value)


def _flag(value: object, _: Bodies) -> bool:
    return reading.boolean(value)


def _dtype(value: object, _: Bodies) -> str:
    return read_dtype(value)


def _type(value: object, _: Bodies) -> Type:
    return read_type(value)


def _number(value: object, _: Bodies) -> Any:
    return read_number(value)


def _literal(value: object, _: Bodies) -> Any:
    if isinstance(value, dict) and value.keys() == {"array"}:
        return _array(value["array"])
    return read_number(value)


def _body(value: object, bodies: Bodies) -> Graph:
    return bodies(reading.string(reading.record(value, "graph")["graph"], 64, "a hash"))


def _body_or_none(value: object, bodies: Bodies) -> Graph | None:
    return None if value is None else _body(value, bodies)


def _nested(**fields: Any) -> Callable[[object, Bodies], Mapping[str, Any]]:
    return lambda value, bodies: read_attributes(value, fields, bodies)


def read_dtype(value: object) -> str:
    reading.one_of(value, DTYPES, "a dtype")
    return str(value)


def read_type(value: object) -> Type:
    dtype, shape = reading.row(value, 2, "a type")
    found = Type(read_dtype(dtype), tuple(reading.integers(shape, 0, 2**40, "a shape")))
    if len(found.shape) > 32 or found.size > reading.MOST_ELEMENTS:
        raise Unreadable(f"a tensor of {len(found.shape)} axes and {found.size} elements")
    return found


def read_number(value: object) -> bool | int | float | Fraction:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, dict) and value.keys() == {"float"}:
        return float(
            reading.one_of(value["float"], {n: n for n in ("inf", "-inf", "nan")}, "a float")
        )
    if isinstance(value, dict) and value.keys() == {"fraction"}:
        n, d = reading.row(value["fraction"], 2, "a fraction")
        if type(n) is int and type(d) is int and d > 0:
            return Fraction(n, d)
    raise Unreadable("a number is neither an integer, a float nor a fraction")


def _array(value: object) -> Literal:
    dtype, shape, text = reading.row(value, 3, "an array")
    type_ = read_type([dtype, shape])
    try:
        data = base64.b64decode(reading.string(text, reading.MOST_BYTES), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unreadable("an array is not base64") from error
    held = {"bfloat16": "uint16", "bool": "uint8"}.get(type_.dtype, type_.dtype)
    if type_.dtype.startswith("float8") or len(data) != type_.size * np.dtype(held).itemsize:
        raise Unreadable(f"an array of {len(data)} bytes is no {type_}")
    array = np.frombuffer(data, np.dtype(held).newbyteorder("<")).reshape(type_.shape)
    if type_.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    array = array.astype(np.float64) if is_float(type_.dtype) else array.astype(held)
    return Literal(array, f"{type_} {reading.digest(data)}")


Schema = dict[str, Callable[[object, Bodies], Any]]
_LEAF: Schema = {"name": _name, "type": _type}
_AXES: Schema = {"axes": _ints}
_AXIS: Schema = {"axis": _int}
_SHAPE: Schema = {"shape": _ints}
_WINDOW: Schema = {"axes": _ints, "sizes": _ints, "strides": _ints, "dilations": _ints}
_CONV: Schema = {"strides": _ints, "padding": _pairs, "dilations": _ints, "groups": _int}
_POOL: Schema = {
    "sizes": _ints,
    "strides": _ints,
    "padding": _ints,
    "dilations": _ints,
    "count_padding": _flag,
}
_NORM: Schema = {"dims": _int, "eps": _number}
_ATTENTION: Schema = {"scale": _number, "causal": _flag}
_HEAD: Schema = {"label_smoothing": _number, "rounded": _flag}
_CONV_GRAD: Schema = {"conv": _nested(**_CONV), **_SHAPE}

# The attributes of every op that a graph may have; an op that is not here is refused.
SCHEMA: dict[str, Schema] = {
    "input": _LEAF, "parameter": _LEAF, "state": _LEAF,
    "constant": {"value": _literal, "type": _type},
    "iota": {**_AXIS, **_SHAPE, "dtype": _dtype}, "cast": {"dtype": _dtype},
    "reduce_sum": _AXES, "reduce_max": _AXES, "reduce_min": _AXES, "reduce_prod": _AXES,
    "argmax": _AXIS, "argmin": _AXIS, "cumsum": {**_AXIS, "reverse": _flag},
    "sort": {**_AXIS, "descending": _flag}, "top_k": {"k": _int, **_AXIS, "largest": _flag},
    "reshape": _SHAPE, "permute": _AXES, "broadcast": {**_SHAPE, **_AXES},
    "slice": {"starts": _ints, "stops": _ints, "strides": _ints},
    "pad": {"low": _ints, "high": _ints, "interior": _ints, "value": _number},
    "concat": _AXIS, "flip": _AXES, "dynamic_slice": {"sizes": _ints}, "dynamic_update_slice": {},
    "contract": {"spec": _name, "dtype": _dtype}, "window": _WINDOW,
    "unwindow": {"window": _nested(**_WINDOW), **_SHAPE},
    "gather": {**_AXIS, "batch": _int}, "scatter_add": {**_AXIS, "size": _int, "batch": _int},
    "random_bits": {"site": _int, **_SHAPE, "blocks": _int},
    "call": {"body": _body, "name": _name, "recompute": _flag, "backward": _body_or_none},
    "scan": {"body": _body, "constants": _int, "carries": _int, "length": _int, "reverse": _flag,
             "recompute": _flag},
    "relu": {}, "sigmoid": {}, "silu": {}, "embedding": {}, "gelu": {"approximate": _name},
    "softplus": {"beta": _number, "threshold": _number}, "mean": _AXES,
    "var": {**_AXES, "correction": _int}, "softmax": _AXIS, "log_softmax": _AXIS,
    "logsumexp": _AXES,
    "layer_norm": _NORM, "rms_norm": _NORM, "batch_norm": {"eps": _number},
    "group_norm": {"groups": _int, "eps": _number}, "attention": _ATTENTION,
    "attention_grad": _ATTENTION, "cross_entropy": {"label_smoothing": _number},
    "linear_cross_entropy": _HEAD, "linear_cross_entropy_grad": _HEAD, "conv": _CONV,
    "conv_grad_x": _CONV_GRAD, "conv_grad_w": _CONV_GRAD, "max_pool": _POOL, "avg_pool": _POOL,
    "one_hot": {"classes": _int, "dtype": _dtype},
}  # fmt: skip
SCHEMA |= {
    op: {}
    for op in "neg abs sign floor exp log sqrt rsqrt sin cos tanh erf not stop_gradient shard_sum "
    "add sub mul div floordiv mod max min pow atan2 eq lt le and or xor where".split()
}


def read_attributes(value: object, schema: Mapping[str, Any], bodies: Bodies) -> dict[str, Any]:
    found = reading.record(value, *schema, what="attributes")
    return {name: read(found[name], bodies) for name, read in schema.items()}


def read_graph(record: object, bodies: Bodies, digest: str = "") -> Graph:
    """A graph whose every node is of a known op and has the types that it says it has."""
    found = reading.record(record, "name", "lines", "nodes", "outputs", what="a graph")
    lines = reading.each(found["lines"], reading.string)
    nodes: list[Node] = []
    known: dict[
        str, tuple[dict[str, Any], str]
    ] = {}  # attributes by their text: layers repeat them

    def value_of(given: object) -> Value:
        node, output = reading.row(given, 2, "a value")
        at = reading.integer(node, 0, len(nodes) - 1, "an operand's node")
        return Value(
            at, reading.integer(output, 0, len(nodes[at].types) - 1, "an operand's output")
        )

    for given in reading.items(found["nodes"], MOST_NODES, "nodes"):
        op, raw, operands, types, line = reading.row(given, 5, "a node")
        schema = reading.one_of(op, SCHEMA, "an op")
        text = f"{op} {json.dumps(raw, sort_keys=True)}" if raw else op
        if text not in known:
            known[text] = (
                read_attributes(raw, schema, bodies),
                text if len(text) < 500 else reading.digest(text.encode()),
            )
        attributes, key = known[text]
        values = tuple([value_of(v) for v in reading.items(operands, 10_000, "operands")])
        stated = tuple([read_type(t) for t in reading.items(types, 1000, "types")])
        inferred = infer(op, attributes, tuple([nodes[v.node].types[v.output] for v in values]))
        if stated != inferred:
            told = ", ".join(map(str, stated)), ", ".join(map(str, inferred))
            raise Rejected(
                f"node {len(nodes)} of {found['name']!r}: {op} gives {told[1]}, not {told[0]}"
            )
        at = reading.integer(line, -1, len(lines) - 1, "a line")
        nodes.append(Node(op, attributes, values, stated, lines[at] if at >= 0 else "", key))
    outputs = [_output(o, value_of) for o in reading.items(found["outputs"], MOST_NODES, "outputs")]
    graph = Graph(tuple(nodes), tuple(outputs), reading.string(found["name"]), digest)
    if len(graph.leaves) != sum(n.op in LEAVES for n in nodes):
        raise Rejected(f"two leaves of {graph.name!r} have one name")
    return graph


def _output(given: object, value_of: Callable[[object], Value]) -> tuple[str, str, Value]:
    kind, name, value = reading.row(given, 3, "an output")
    return (
        reading.one_of(kind, {k: k for k in KINDS}, "an output's kind"),
        reading.string(name),
        value_of(value),
    )
