"""Where a NaN or an infinity came from: the graph once more, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.base.errors import TreadleError
from treadle.base.origin import Origin
from treadle.domains.domain import Typed, apply, evaluate, input_names, last_uses
from treadle.domains.float64 import Array, Float64, lift
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph, Node, Output, Value
from treadle.ir.ops.leaves import CONSTANT, INPUT, STATE, Leaf
from treadle.ir.types import TensorType

MOST_OPERANDS = 4  # that a message describes


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The first node that made a NaN or an infinity which reached what was computed.

    `leaf` is its name if it is an input, a parameter or a state: then it came from outside.
    """

    node: int  # its position in the graph
    op: str
    made: str  # "NaN" or "infinity"
    type: TensorType
    count: int  # elements that are so
    place: tuple[int, ...]  # of the first of them
    operands: tuple[str, ...]  # types and ranges
    origin: Origin | None
    leaf: str | None = None
    part: str = ""  # of the step: forward pass, backward pass or update
    scan_step: int | None = None

    def __str__(self) -> str:
        if self.leaf is not None:
            return f"{self.leaf} has {self.made}{self._elements(' in')}"
        where = f" in the {self.part}" if self.part else ""
        step = "" if self.scan_step is None else f", step {self.scan_step} of a scan"
        given = f"; of {', '.join(self.operands)}" if self.operands else ""
        return f"{self.op} made {self.made}{where}{step}{self._elements(':')}{given}"

    def _elements(self, before: str) -> str:
        if not self.type.shape:
            return ""
        return f"{before} {self.count} of {self.type.size} elements, first at {list(self.place)}"


class AnomalyError(TreadleError, ArithmeticError):
    """A step made a NaN or an infinity, and was undone; `anomaly` is where, if that was found."""

    def __init__(self, cause: str, remedy: str, anomaly: Anomaly | None = None):
        self.anomaly = anomaly
        origin = None if anomaly is None else anomaly.origin
        super().__init__("step", cause, remedy, origin=origin)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What one value has that is not finite."""

    nan: bool
    infinite: bool

    def __bool__(self) -> bool:
        return self.nan or self.infinite


_FINE = _Mark(False, False)
Marks = list[tuple[_Mark, ...]]  # of every node's results


def find_anomaly(
    graph: Graph, inputs: Mapping[str, object], domain: Float64, roots: Sequence[Output]
) -> Anomaly | None:
    """What made the NaN or infinity of the first root that has one; None if all are finite.

    An infinity that is made and then masked, or that a mask is made of, is no anomaly: only chains
    of values that are not finite, from a root back to where all operands were finite, count.
    """
    leaves = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    arrays = {n: lift(inputs[n], t) for n, t in leaves.items()}
    marks = _marks(graph, arrays, domain)
    for root in roots:
        chain = _chain(graph, marks, [root])
        if chain:
            # Without a maker the chain begins with an infinity that came from outside.
            first = next((i for i in chain if _is_made(graph, marks, i)), chain[0])
            return _described(graph, first, arrays, domain)
    return None


def _marks(graph: Graph, inputs: Mapping[str, Array], domain: Float64) -> Marks:
    return [tuple(_mark(r) for r in results) for _, _, results in _walk(graph, inputs, domain)]


def _walk(
    graph: Graph, inputs: Mapping[str, Array], domain: Float64
) -> Iterator[tuple[int, list[Typed[Array]], tuple[Array, ...]]]:
    """Every node's position, operands and results, in order; values die when last used."""
    dying = last_uses(graph)
    known: list[tuple[Array, ...]] = []
    for position, node in enumerate(graph.nodes):
        operands = [Typed(graph.type_of(v), known[v.node][v.output]) for v in node.operands]
        if isinstance(node.attributes, Leaf):
            known.append((inputs[node.attributes.name],))
        else:
            known.append(tuple(apply(domain, node.op, node.attributes, operands, node.types)))
        yield position, operands, known[-1]
        for dead in dying.get(position, ()):
            known[dead] = ()


def _mark(array: Array) -> _Mark:
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return _FINE
    return _Mark(bool(np.isnan(array).any()), bool(np.isinf(array).any()))


def _chain(graph: Graph, marks: Marks, roots: Sequence[Output]) -> list[int]:
    """Nodes from which a value that is not finite led to a root, in order."""

    def is_marked(value: Value) -> bool:
        return bool(marks[value.node][value.output])

    found: set[int] = set()
    stack = [o.value.node for o in roots if is_marked(o.value)]
    while stack:
        position = stack.pop()
        if position not in found:
            found.add(position)
            stack += [v.node for v in graph.nodes[position].operands if is_marked(v)]
    return sorted(found)


def _is_made(graph: Graph, marks: Marks, position: int) -> bool:
    """Whether a NaN, or an infinity, is in a result but in no operand.

    What comes from outside may be infinite: masks are. Parameters may not.
    """
    node = graph.nodes[position]
    if node.op in (INPUT, STATE, CONSTANT):
        return marks[position][0].nan
    before = [marks[v.node][v.output] for v in node.operands]
    has_nan = any(m.nan for m in marks[position]) and not any(m.nan for m in before)
    has_infinity = any(m.infinite for m in marks[position]) and not any(before)
    return has_nan or has_infinity


def _described(
    graph: Graph, position: int, inputs: Mapping[str, Array], domain: Float64
) -> Anomaly:
    """The graph is walked again, up to the node: the values of all of them were not kept."""
    walk = _walk(graph, inputs, domain)
    operands, results = next((o, r) for i, o, r in walk if i == position)
    node = graph.nodes[position]
    inner = _inside(node, [o.value for o in operands], domain)
    if inner is not None:
        return replace(inner, node=position, origin=inner.origin or node.origin)
    worst = next(i for i, r in enumerate(results) if _mark(r))
    is_nan = np.isnan(results[worst])
    bad = is_nan if is_nan.any() else np.isinf(results[worst])
    return Anomaly(
        position,
        node.op.name,
        "NaN" if is_nan.any() else "infinity",
        node.types[worst],
        int(bad.sum()),
        tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape)),
        tuple(_range(o) for o in operands[:MOST_OPERANDS]),
        node.origin,
        node.attributes.name if isinstance(node.attributes, Leaf) else None,
    )


def _range(operand: Typed[Array]) -> str:
    """A type and the range of its values."""
    array = operand.value
    if not array.size:
        return str(operand.type)
    low, high = float(array.min()), float(array.max())
    span = f"{low:.6g}" if array.size == 1 else f"from {low:.6g} to {high:.6g}"
    return f"{operand.type} {span}"


def _inside(node: Node, operands: Sequence[Array], domain: Float64) -> Anomaly | None:
    """The node inside a call's or a scan's body, if it is there."""
    if isinstance(node.attributes, Call):
        return _in_body(node.attributes.body, operands, domain)
    if isinstance(node.attributes, Scan):
        return _in_scan(node.attributes, operands, domain)
    return None


def _in_body(body: Graph, given: Sequence[Array], domain: Float64) -> Anomaly | None:
    inputs = dict(zip(input_names(body), given, strict=True))
    marks = _marks(body, inputs, domain)
    makers = [i for i in _chain(body, marks, body.outputs) if _is_made(body, marks, i)]
    return _described(body, makers[0], inputs, domain) if makers else None


def _in_scan(scan: Scan, operands: Sequence[Array], domain: Float64) -> Anomaly | None:
    """Step by step, until one makes something that is not finite."""
    split = scan.constants + scan.carries
    constants, carries = operands[: scan.constants], list(operands[scan.constants : split])
    names = input_names(scan.body)
    steps = range(scan.length)
    for i in reversed(steps) if scan.reverse else steps:
        given = [*constants, *carries, *(x[i] for x in operands[split:])]
        found = _in_body(scan.body, given, domain)
        if found is not None:
            return found if found.scan_step is not None else replace(found, scan_step=i)
        values = evaluate(scan.body, dict(zip(names, given, strict=True)), domain)
        carries = list(values[: scan.carries])
    return None
