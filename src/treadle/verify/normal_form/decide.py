"""The normal form of a graph, and whether two graphs are the same function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import Leaf
from treadle.verify.counterexample import counterexample
from treadle.verify.normal_form import elements as elements  # fills the table
from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form import moved_elements as moved_elements
from treadle.verify.normal_form.algebra import subtract, without_denominators
from treadle.verify.normal_form.form import BUDGET, BudgetError, Form
from treadle.verify.normal_form.functions import Assumption, Work
from treadle.verify.normal_form.graphs import Reader, opened
from treadle.verify.normal_form.index import Index, Variable
from treadle.verify.normal_form.sizes import AS_GIVEN, Sizes

EXACT: frozenset[Assumption] = frozenset([Assumption.INDICES_IN_RANGE])
MOST_PRODUCTS = 4_000  # of atoms: the largest of the tests takes 400
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
    work: int = 0  # elements of tensors that were looked at

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


def products_spent() -> int:
    """Products of atoms that the last form took."""
    return MOST_PRODUCTS - BUDGET.left


def all_spent() -> int:
    """Products of atoms of all forms of this thread so far, and what was spent beside them."""
    return BUDGET.spent + products_spent()


def spend(products: int) -> None:
    """Count work beside forms that takes as long as so many products."""
    BUDGET.spent += products


def _work(graph: Graph, allowed: Iterable[Assumption], unrolled: int) -> Work:
    integers = set()
    for position in graph.leaves.values():
        node = graph.nodes[position]
        if isinstance(node.attributes, Leaf) and node.types[0].dtype.is_integer:
            integers.add(node.attributes.name)
    return Work(frozenset(allowed), frozenset(integers), unrolled)


def _normal_form(graph: Graph, work: Work, sizes: Sizes) -> NormalForm:
    BUDGET.spent, BUDGET.left = all_spent(), MOST_PRODUCTS
    graph = opened(graph)
    if any(0 in t.shape for n in graph.nodes for t in n.types):
        raise BudgetError("a tensor without elements: sizes are at least 1 here")
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

    `evaluate` looks for values for which they differ, where no proof was found.
    """
    reason = ""
    sizes_of_sums = {0}
    for before, unrolled in pairwise((-1, *UNROLLED)):
        # Writing sums out changes nothing where none is so short.
        if not any(before < n <= unrolled for n in sizes_of_sums):
            continue
        work = _work(left, allowed, unrolled)
        work.integers |= _work(right, (), 0).integers
        try:
            verdict = _proved(left, right, work, sizes)
        except (BudgetError, RecursionError) as error:
            reason = str(error)
        else:
            if verdict is not None:
                return verdict
            reason = "the normal forms differ"
        sizes_of_sums |= work.known_sizes
    return _evaluated(left, right, reason) if evaluate else Verdict(Outcome.UNKNOWN, reason=reason)


def _proved(left: Graph, right: Graph, work: Work, sizes: Sizes) -> Verdict | None:
    one = _normal_form(left, work, sizes)
    before, work.count = work.count, 0
    other = _normal_form(right, work, sizes)
    if one.shapes != other.shapes:
        return Verdict(Outcome.DIFFERENT, reason=f"shapes {one.shapes} and {other.shapes}")
    for x, y in zip(one.elements, other.elements, strict=True):
        if x != y and without_denominators(subtract(x, y)).terms:
            return None
    return Verdict(Outcome.PROVED, frozenset(work.made), work=before + work.count)


def _evaluated(left: Graph, right: Graph, reason: str) -> Verdict:
    found = counterexample(left, right)
    if found:
        return Verdict(Outcome.DIFFERENT, reason=found)
    return Verdict(Outcome.UNKNOWN, reason=f"{reason}; equal for the values that were tried")
