"""Text back into graphs. Everything read is checked: `verify` runs on the result."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from fractions import Fraction

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ParseError
from treadle.base.origin import Origin
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import OPS, Attributes
from treadle.ir.table import FAMILIES
from treadle.ir.types import TensorType
from treadle.ir.verify import verify

_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<type>(?:float|bfloat|int|uint|bool)\d*\[[\d,]*\])
  | (?P<value>%\d+(?:\.\d+)?)
  | (?P<graph>@\d+)
  | (?P<fraction>-?\d+/\d+)
  | (?P<float>-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)\b)
  | (?P<int>-?\d+)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark>[(){},;:=])
  | (?P<space>\s+)
    """,
    re.VERBOSE,
)
_ORIGIN = re.compile(r"^(?P<file>.+):(?P<line>\d+) in (?P<function>.+)$")
# Attributes that stand inside other attributes, by class name.
_CLASSES = {
    cls.__name__: cls
    for family in FAMILIES
    for cls in vars(family).values()
    if isinstance(cls, type) and issubclass(cls, Attributes) and dataclasses.is_dataclass(cls)
}
_WORDS = {"True": True, "False": False, "None": None} | dtypes.EVERY


def parse(text: str) -> Graph:
    """The graph that `to_text` printed: the last one in the text, verified."""
    graphs: dict[str, Graph] = {}
    last: Graph | None = None
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        head = re.fullmatch(r"graph (?P<title>.+) \{", line.strip())
        if head is None:
            if line.strip():
                raise _wrong(number, line, "expected 'graph NAME {'")
            continue
        body: list[tuple[int, str]] = []
        for inner in lines:
            if inner[1].strip() == "}":
                break
            body.append(inner)
        else:
            raise _wrong(number, line, "no closing brace")
        last = _parse_graph(head["title"], body, graphs)
        graphs[head["title"]] = last
    if last is None:
        raise ParseError("parse", "there is no graph in the text")
    return verify(last)


def _parse_graph(title: str, lines: list[tuple[int, str]], graphs: dict[str, Graph]) -> Graph:
    nodes: list[Node] = []
    outputs: list[Output] = []
    for number, line in lines:
        code, _, comment = line.strip().partition("  # ")
        reader = _Reader(number, code, graphs)
        if code.startswith("%"):
            nodes.append(reader.node(len(nodes), _parse_origin(comment)))
        else:
            outputs.append(reader.output())
    return Graph(tuple(nodes), tuple(outputs), title)


def _parse_origin(comment: str) -> Origin | None:
    found = _ORIGIN.match(comment)
    return Origin(found["file"], int(found["line"]), found["function"]) if found else None


def _wrong(number: int, line: str, cause: str) -> ParseError:
    return ParseError("parse", f"line {number}: {cause}: {line.strip()!r}")


class _Reader:
    """Reads one line, token by token."""

    def __init__(self, number: int, line: str, graphs: dict[str, Graph]):
        self.number, self.line, self.graphs = number, line, graphs
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(line):
            found = _TOKEN.match(line, position)
            if found is None:
                raise self.wrong(f"unreadable at column {position + 1}")
            position = found.end()
            if found.lastgroup != "space":
                self.tokens.append((str(found.lastgroup), found.group()))
        self.tokens.reverse()  # popped from the end

    def wrong(self, cause: str) -> ParseError:
        return _wrong(self.number, self.line, cause)

    def peek(self) -> str:
        return self.tokens[-1][1] if self.tokens else ""

    def take(self, kind: str, text: str | None = None) -> str:
        if not self.tokens or self.tokens[-1][0] != kind or text not in (None, self.tokens[-1][1]):
            raise self.wrong(f"expected {text or kind}, found {self.peek()!r}")
        return self.tokens.pop()[1]

    def skip(self, mark: str) -> bool:
        if self.peek() == mark:
            self.tokens.pop()
            return True
        return False

    def node(self, position: int, origin: Origin | None) -> Node:
        if self.take("value") != f"%{position}":
            raise self.wrong(f"expected node %{position}")
        self.take("mark", "=")
        op = OPS.get(self.take("name"))
        if op is None:
            raise self.wrong("unknown op")
        self.take("mark", "(")
        operands: list[Value] = []
        while self.peek().startswith("%"):
            operands.append(self.value())
            self.skip(",")
        self.skip(";")
        attributes = self.fields(op.attributes)
        self.take("mark", ":")
        types = [self.tensor_type()]
        while self.skip(","):
            types.append(self.tensor_type())
        return Node(op, attributes, tuple(operands), tuple(types), origin)

    def output(self) -> Output:
        word = self.take("name")
        kinds = {k.value: k for k in OutputKind}
        if word not in kinds:
            raise self.wrong(f"expected a node or an output ({', '.join(kinds)})")
        name = self.string()
        self.take("mark", "=")
        return Output(kinds[word], name, self.value())

    def value(self) -> Value:
        node, _, output = self.take("value")[1:].partition(".")
        return Value(int(node), int(output or 0))

    def string(self) -> str:
        body = self.take("string")[1:-1]
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], body)

    def tensor_type(self) -> TensorType:
        name, _, sizes = self.take("type")[:-1].partition("[")
        if name not in dtypes.EVERY:
            raise self.wrong(f"unknown dtype {name}")
        return TensorType(tuple(int(n) for n in sizes.split(",") if n), dtypes.EVERY[name])

    def fields(self, cls: type[Attributes]) -> Attributes:
        """`name=value, …)`, the opening parenthesis already taken."""
        values: dict[str, object] = {}
        while not self.skip(")"):
            name = self.take("name")
            self.take("mark", "=")
            values[name] = self.attribute()
            self.skip(",")
        try:
            return cls(**values)
        except TypeError as error:
            raise self.wrong(f"{cls.__name__}: {error}") from error

    def attribute(self) -> object:
        kind, text = self.tokens[-1] if self.tokens else ("", "")
        match kind:
            case "string":
                return self.string()
            case "type":
                return self.tensor_type()
            case "graph":
                return self.graph()
            case "fraction":
                return Fraction(self.take("fraction"))
            case "float":
                return float(self.take("float"))
            case "int":
                return int(self.take("int"))
            case "name":
                return self.word()
            case _ if text == "(":
                return self.items()
        raise self.wrong(f"expected an attribute, found {text!r}")

    def graph(self) -> Graph:
        name = self.take("graph")
        if name not in self.graphs:
            raise self.wrong(f"graph {name} is not defined above")
        return self.graphs[name]

    def items(self) -> tuple[object, ...]:
        self.take("mark", "(")
        items: list[object] = []
        while not self.skip(")"):
            items.append(self.attribute())
            self.skip(",")
        return tuple(items)

    def word(self) -> object:
        word = self.take("name")
        if word in _WORDS:
            return _WORDS[word]
        if word in ("inf", "nan"):
            return float(word)
        self.take("mark", "(")
        if word == "array":
            return self.array()
        if word not in _CLASSES:
            raise self.wrong(f"unknown name {word}")
        return self.fields(_CLASSES[word])

    def array(self) -> ArrayLiteral:
        type_ = self.tensor_type()
        self.take("mark", ",")
        try:
            data = base64.b64decode(self.string(), validate=True)
        except binascii.Error as error:
            raise self.wrong("the array is not base64") from error
        self.take("mark", ")")
        if len(data) != type_.nbytes:
            raise self.wrong(f"the array has {len(data)} bytes, {type_} needs {type_.nbytes}")
        return ArrayLiteral(np.frombuffer(data, type_.dtype.numpy).reshape(type_.shape))
