"""What graphs are made of: types, values, nodes. Frozen; whoever makes one has checked it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from treadle_checker.field import Array

KINDS = ("result", "gradient", "capture", "metric", "weight", "update", "print")
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


@dataclass(frozen=True, slots=True)
class Literal:
    """An array of a constant; floats are float64, exactly."""

    array: Array
    text: str  # what it was read from, by which literals are compared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


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

    @property
    def output_types(self) -> tuple[Type, ...]:
        return tuple(self.type_of(v) for _, _, v in self.outputs)


def key_of(op: str, attributes: Mapping[str, Any]) -> str:
    return f"{op} {json.dumps(attributes, sort_keys=True, default=_text)}" if attributes else op


def _text(value: object) -> str:
    if isinstance(value, Graph):
        return value.digest or repr(value)
    return value.text if isinstance(value, Literal) else f"{value!r}"
