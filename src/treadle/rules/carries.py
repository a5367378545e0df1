"""What a scan carries, chosen so that an iteration is few kernels where a library multiplies.

Elementwise work beside a library's matmul is a kernel of its own. What stands behind the matmul of
one iteration and before that of the next is one kernel only if it stands on one side of the carry:
a carry that a matmul reads rounded is carried rounded too, and a carry that is a sum of a matmul is
carried as its terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.ir.control import SCAN, Scan, body_input_types
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import NONE
from treadle.ir.ops.elementwise import ADD, CAST, Cast
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.driver import rewrite
from treadle.rules.pattern import apply, number_of
from treadle.rules.rule import Body, Exactness, Match, Rule, RuleSet


def _scan(match: Match) -> Scan:
    assert isinstance(match.root.attributes, Scan)
    return match.root.attributes


def _carries(scan: Scan) -> list[Value]:
    """The carries among the body's inputs."""
    return [Value(i) for i in scan.body.inputs[scan.constants : scan.constants + scan.carries]]


def _is_multiplied(body: Graph, value: Value) -> bool:
    return any(n.op is CONTRACT and value in n.operands for n in body.nodes)


class _Rebuilt:
    """A graph in the place of a scan, whose scan carries tensors of other types."""

    def __init__(self, scan: Scan, carried: Sequence[TensorType]):
        self.scan, self.outer, self.inner = scan, GraphBuilder(), GraphBuilder()
        types, first, last = body_input_types(scan.body), scan.constants, scan.carries
        before, own, slices = types[:first], types[first : first + last], types[first + last :]
        whole = [t.with_shape((scan.length, *t.shape)) for t in slices]
        self.given = _inputs(self.outer, [*before, *own, *whole])
        inputs = _inputs(self.inner, [*before, *carried, *slices])
        count = first + len(carried)
        self.constants, self.slices = inputs[:first], inputs[count:]
        self.carries = inputs[first:count]  # of the new body
        self.firsts = self.given[first : first + last]  # of the old scan

    def copied(self, carries: Sequence[Value], known: Mapping[Value, Value]) -> list[Value]:
        """The body's outputs, over what stands for its carries and some of its other values."""
        body = self.scan.body
        inputs = (Value(i) for i in body.inputs)
        moved = dict(zip(inputs, [*self.constants, *carries, *self.slices], strict=True))
        moved |= known
        for i, node in enumerate(body.nodes):
            if node.op is INPUT:
                continue
            position = self.inner.copy(node, [moved[v] for v in node.operands])
            for k in range(len(node.types)):
                moved.setdefault(Value(i, k), Value(position, k))
        self.moved = moved
        return [moved[o.value] for o in body.outputs]

    def scanned(self, outputs: Sequence[Value], firsts: Sequence[Value]) -> tuple[Value, ...]:
        """The new scan, of carries that start as they are told to."""
        body = self.inner.build(_results(outputs), self.scan.body.name)
        attributes = replace(self.scan, body=remove_dead_code(body), carries=len(self.carries))
        slices = self.given[self.scan.constants + self.scan.carries :]
        operands = [*self.given[: self.scan.constants], *firsts, *slices]
        return self.outer.add(SCAN, attributes, operands)

    def body(self, results: Sequence[Value], match: Match) -> Body:
        return Body(self.outer.build(_results(results), self.scan.body.name), match.root.operands)


def _inputs(builder: GraphBuilder, types: Sequence[TensorType]) -> list[Value]:
    return [builder.add(INPUT, Leaf(f"in{i}", t), ())[0] for i, t in enumerate(types)]


def _results(values: Sequence[Value]) -> list[Output]:
    return [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values)]


# Rounded


def _rounded(scan: Scan) -> tuple[int, Value] | None:
    """A carry of which a matmul reads a narrower cast, by its number, and that cast."""
    body = scan.body
    for k, carry in enumerate(_carries(scan)):
        of_next = body.nodes[body.outputs[k].value.node]
        for position, node in enumerate(body.nodes):
            if node.op is not CAST or node.operands != (carry,):
                continue
            is_less = node.types[0].dtype.itemsize < body.type_of(carry).dtype.itemsize
            is_read = is_less and _is_multiplied(body, Value(position))
            if is_read and not isinstance(of_next.attributes, Leaf):
                return k, Value(position)
    return None


def is_multiplied_rounded(match: Match) -> bool:
    """a matmul reads the cast of a carry to fewer bytes, and launches are what counts"""
    return match.target.has_launches and _rounded(_scan(match)) is not None


def _also_rounded(match: Match, builder: GraphBuilder) -> Body:
    scan, found = _scan(match), _rounded(_scan(match))
    assert found is not None
    k, value = found
    attributes, count = scan.body.nodes[value.node].attributes, scan.carries
    types = [*map(scan.body.type_of, _carries(scan)), scan.body.type_of(value)]
    rebuilt = _Rebuilt(scan, types)
    outputs = rebuilt.copied(rebuilt.carries[:count], {value: rebuilt.carries[count]})
    (next_,) = rebuilt.inner.add(CAST, attributes, (outputs[k],))
    (first,) = rebuilt.outer.add(CAST, attributes, (rebuilt.firsts[k],))
    outputs = [*outputs[:count], next_, *outputs[count:]]
    values = rebuilt.scanned(outputs, [*rebuilt.firsts, first])
    return rebuilt.body([*values[:count], *values[count + 1 :]], match)


ROUNDED = Rule(
    "rounded_carry",
    "A carry that a matmul reads rounded is also carried rounded.",
    apply(SCAN),
    _also_rounded,
    is_multiplied_rounded,
)


# Terms


@dataclass(frozen=True, slots=True)
class _Terms:
    """A carry, by its number, whose next value is a sum of a matmul, or its cast."""

    carry: int
    matmul: Value
    other: Value | None  # the other term
    at: int  # which term the matmul is

    def sum(self, builder: GraphBuilder, product: Value, other: Value, like: TensorType) -> Value:
        """What the carry is, from its terms."""
        if builder.type_of(product).dtype is not like.dtype:
            (product,) = builder.add(CAST, Cast(like.dtype), (product,))
        if self.other is None:
            return product
        terms = (other, product) if self.at else (product, other)
        return builder.add(ADD, NONE, terms)[0]


def _terms(match: Match) -> _Terms | None:
    scan = _scan(match)
    body, stacked = scan.body, [o.value for o in scan.body.outputs[scan.carries :]]
    for k in range(scan.carries):
        value = body.outputs[k].value
        node = body.nodes[value.node]
        if value in stacked or _is_multiplied(body, value):
            continue
        for at, term in enumerate(node.operands if node.op is ADD else (value,)):
            matmul = _matmul(body, term)
            other = node.operands[1 - at] if node.op is ADD else None
            is_zero = number_of(match.graph, match.root.operands[scan.constants + k]) == 0
            if matmul is not None and (other is not None or (matmul != value and is_zero)):
                return _Terms(k, matmul, other, at)
    return None


def _matmul(body: Graph, value: Value) -> Value | None:
    """The matmul that a value is, or is the cast of."""
    node = body.nodes[value.node]
    if node.op is CAST:
        value = node.operands[0]
    return value if body.nodes[value.node].op is CONTRACT else None


def is_sum_of_matmul(match: Match) -> bool:
    """a carry's next value is a sum of a library's matmul, or its cast, and the first is 0"""
    is_library = match.target.has_launches and match.target.matmuls.by_library
    return is_library and _terms(match) is not None


def _carried_as_terms(match: Match, builder: GraphBuilder) -> Body:
    scan, found = _scan(match), _terms(match)
    assert found is not None
    k, count = found.carry, scan.carries
    types = [scan.body.type_of(v) for v in _carries(scan)]
    like, of_product = types[k], scan.body.type_of(found.matmul)
    types += [of_product] if found.other is not None else []
    types[k] = like if found.other is not None else of_product
    rebuilt = _Rebuilt(scan, types)
    carries, product = rebuilt.carries[:count], rebuilt.carries[-1 if found.other else k]
    carries[k] = found.sum(rebuilt.inner, product, carries[k], like)
    outputs = rebuilt.copied(carries, {})
    (zero,) = rebuilt.outer.add(CONSTANT, Constant(0, of_product), ())
    firsts, next_ = list(rebuilt.firsts), outputs[:count]
    if found.other is None:
        firsts[k], next_[k] = zero, rebuilt.moved[found.matmul]
    else:
        firsts, next_[k] = [*firsts, zero], rebuilt.moved[found.other]
        next_.append(rebuilt.moved[found.matmul])
    values = rebuilt.scanned([*next_, *outputs[count:]], firsts)
    last = values[count if found.other is not None else k]
    results = [*values[:count], *values[len(firsts) :]]
    results[k] = found.sum(rebuilt.outer, last, values[k], like)
    return rebuilt.body(results, match)


TERMS = Rule(
    "carried_terms",
    "A carry that is a sum of a matmul is carried as its terms, and added where it is read.",
    apply(SCAN),
    _carried_as_terms,
    is_sum_of_matmul,
    Exactness.ROUNDING,
)

CARRIES = RuleSet("carries", (ROUNDED, TERMS))


def choose_carries(graph: Graph, target: Target) -> Graph:
    """The graph with scans that carry what makes their iterations few kernels."""
    is_done = not any(n.op is SCAN for n in graph.nodes)
    while not is_done:  # what a rule built does not see what its carries start from
        fired: Counter[str] = Counter()
        graph, is_done = rewrite(graph, CARRIES, target, fired), not fired
    return graph
