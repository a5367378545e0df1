"""The normal form of a graph, and whether two graphs are the same function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from treadle.domains.field import equal_graphs, failure_probability
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import Leaf
from treadle.verify.normal_form import elements  # noqa: F401  (fills the table)
from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form.algebra import BudgetError, subtract, without_denominators
from treadle.verify.normal_form.form import Form
from treadle.verify.normal_form.functions import Assumption, Work
from treadle.verify.normal_form.graphs import Reader, opened
from treadle.verify.normal_form.index import Index, Variable
from treadle.verify.normal_form.sizes import AS_GIVEN, Sizes

EXACT: frozenset[Assumption] = frozenset([Assumption.INDICES_IN_RANGE])
UNROLLED = (0, 3, 9)  # sums of so many terms are written out, if nothing else helps


class Outcome(Enum):
    PROVED = "equal for all values of the leaves"
    DIFFERENT = "different for some values of the leaves"
    UNKNOWN = "neither was shown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about two graphs, by which assumptions, and what stood in the way."""

    outcome: Outcome
    assumptions: frozenset[Assumption] = frozenset()
    reason: str = ""

    @property
    def is_proved(self) -> bool:
        return self.outcome is Outcome.PROVED


@dataclass(frozen=True, slots=True)
class NormalForm:
    """The elements of a graph's outputs. Equal normal forms are equal tensors."""

    shapes: tuple[tuple[Index, ...], ...]
    elements: tuple[Form, ...]
    assumptions: frozenset[Assumption]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NormalForm):
            return NotImplemented
        return self.shapes == other.shapes and self.elements == other.elements

    def __hash__(self) -> int:
        return hash((self.shapes, self.elements))


def of(
    graph: Graph,
    allowed: Iterable[Assumption] = EXACT,
    sizes: Sizes = AS_GIVEN,
    unrolled: int = 0,
) -> NormalForm | None:
    """The normal form of a graph; None if it takes too much work.

    Leaves go by their names. `allowed` are assumptions that may be made; those that were are in the
    result. `unrolled` is up to how many terms of a sum are written out.
    """
    try:
        return _normal_form(graph, _work(graph, allowed, unrolled), sizes)
    except (BudgetError, RecursionError):
        return None


def _work(graph: Graph, allowed: Iterable[Assumption], unrolled: int) -> Work:
    integers = set()
    for position in graph.leaves.values():
        node = graph.nodes[position]
        if isinstance(node.attributes, Leaf) and node.types[0].dtype.is_integer:
            integers.add(node.attributes.name)
    return Work(frozenset(allowed), frozenset(integers), unrolled)


def _normal_form(graph: Graph, work: Work, sizes: Sizes) -> NormalForm:
    graph = opened(graph)
    reader = Reader(graph, work, sizes)
    shapes, found = [], []
    for output in graph.outputs:
        shape = reader.shape(output.value)
        at = [ix.of_letter(Variable(f"i{k}", n)) for k, n in enumerate(shape)]
        shapes.append(shape)
        found.append(reader.at(output.value, at))
    return NormalForm(tuple(shapes), tuple(found), frozenset(work.made))


def equal(
    left: Graph,
    right: Graph,
    allowed: Iterable[Assumption] = EXACT,
    sizes: Sizes = AS_GIVEN,
    evaluate: bool = False,
) -> Verdict:
    """Whether two graphs over the same leaves have the same outputs, in order.

    `evaluate` looks for values for which they differ, where no proof was found: over the finite
    field, so that a difference is never one of rounding.
    """
    reason = ""
    for unrolled in UNROLLED:
        try:
            verdict = _proved(left, right, allowed, sizes, unrolled)
        except (BudgetError, RecursionError) as error:
            reason = str(error)
            continue
        if verdict is not None:
            return verdict
        reason = "the normal forms differ"
    return _evaluated(left, right, reason) if evaluate else Verdict(Outcome.UNKNOWN, reason=reason)


def _proved(
    left: Graph, right: Graph, allowed: Iterable[Assumption], sizes: Sizes, unrolled: int
) -> Verdict | None:
    work = _work(left, allowed, unrolled)
    work.integers |= _work(right, (), 0).integers
    one = _normal_form(left, work, sizes)
    work.count = 0
    other = _normal_form(right, work, sizes)
    if one.shapes != other.shapes:
        return Verdict(Outcome.DIFFERENT, reason=f"shapes {one.shapes} and {other.shapes}")
    for x, y in zip(one.elements, other.elements, strict=True):
        if x != y and without_denominators(subtract(x, y)).terms:
            return None
    return Verdict(Outcome.PROVED, frozenset(work.made))


def _evaluated(left: Graph, right: Graph, reason: str) -> Verdict:
    if equal_graphs(left, right):
        bound = failure_probability(64, 3)
        return Verdict(Outcome.UNKNOWN, reason=f"{reason}; equal on random values ({bound:.0e})")
    return Verdict(Outcome.DIFFERENT, reason="different over a finite field")
