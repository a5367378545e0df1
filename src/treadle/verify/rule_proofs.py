"""Whether a rule that is data holds: proved for all sizes, tested, or refused with an example."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from random import Random

import numpy as np

from treadle.domains.field import equal_graphs, failure_probability
from treadle.egraph.language import DataRule, to_text
from treadle.ir.composites import EMBEDDING
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import Gather, ScatterAdd
from treadle.ir.types import TensorType
from treadle.verify import normal_form
from treadle.verify.counterexample import counterexample, leaves
from treadle.verify.normal_form.functions import Assumption
from treadle.verify.normal_form.sizes import GENERIC, OTHERS, AmbiguousSizeError, Sizes
from treadle.verify.rule_drawing import drawn
from treadle.verify.rule_instances import (
    NUMBERS,
    Instance,
    NoInstanceError,
    label_fields,
    of_case,
    symbols_of,
)

_DRAWS = 60  # of instances with sizes that are symbols, and of small ones
_MOST_DRAWN = 4  # of each that are looked at
_MOST_ALIKE = 12  # with one size for all axes: what mixes them up still has the right type
_SMALL = (1, 2, 3, 4)
_DEGREE = 64  # of the polynomials that both sides are over the field
_TRIALS = 2
_MOST_SIZES = 6  # of a rule's case


class Status(Enum):
    """What is known of a rule."""

    PROVED = "proved for all sizes"
    TESTED = "tested"
    UNDECIDED = "undecided"  # no proof, and the finite field is no model of what it says
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about a rule."""

    status: Status
    proved: int = 0  # instances with symbols for sizes
    tested: int = 0  # small ones, over the finite field
    assumptions: frozenset[Assumption] = frozenset()
    reason: str = ""
    work: int = 0  # elements of tensors that were looked at

    @property
    def bound(self) -> float:
        """The probability that one of the tested instances is different and was not told apart."""
        return failure_probability(_DEGREE, _TRIALS) * max(1, self.tested)


def prove(rule: DataRule) -> Proof:
    """The rule's cases, and others that are drawn, with symbols for sizes and with small ones.

    Drawing is the same in every process.
    """
    random = Random(zlib.crc32(rule.name.encode()))
    try:
        small = list(_small_instances(rule, random))
        symbolic = list(_symbolic_instances(rule, random))
    except NoInstanceError as error:
        return Proof(Status.REFUSED, reason=f"its case is none: {error}")
    if not small:
        return Proof(Status.REFUSED, reason="no instance was found: give it a (case …)")
    agree = [_agrees(found) for found in small]
    for found, is_equal in zip(small, agree, strict=True):
        values = "" if is_equal else counterexample(found.left, found.right)
        if values:
            reason = f"the sides differ for {_described(found)}: {values}"
            return Proof(Status.REFUSED, tested=len(small), reason=reason)
    proof = _proved(symbolic)
    if proof.proved and proof.proved == len(symbolic):
        return replace(proof, status=Status.PROVED, tested=len(small), reason="")
    status = Status.TESTED if all(agree) else Status.UNDECIDED
    return replace(proof, status=status, tested=sum(agree))


def _agrees(found: Instance) -> bool:
    return equal_graphs(found.left, found.right, _given(found.left, found.right), trials=_TRIALS)


def _proved(symbolic: Sequence[tuple[Instance, Sizes]]) -> Proof:
    """How many instances have equal normal forms, and what stood in the way of others."""
    count, work, made, open_ = 0, 0, set[Assumption](), ""
    for found, sizes in symbolic:
        try:
            verdict = normal_form.equal(found.left, found.right, sizes=sizes)
        except AmbiguousSizeError as error:
            open_ = str(error)
            continue
        count, work = count + verdict.is_proved, work + verdict.work
        made |= verdict.assumptions
        open_ = open_ or verdict.reason
    reason = open_ or "no instance with symbols for sizes was found"
    return Proof(Status.UNDECIDED, count, 0, frozenset(made), reason, work)


def _symbolic_instances(rule: DataRule, random: Random) -> Iterator[tuple[Instance, Sizes]]:
    """Cases with symbols for sizes, at two sets of values for them, and drawn ones."""
    for case in rule.cases:
        symbols = symbols_of(case, label_fields(rule))
        for values in (GENERIC, OTHERS):
            named = dict(zip(symbols, values, strict=False))
            yield of_case(rule, case, named), _sizes(values)
    for found in _drawn(rule, random, _MOST_DRAWN, GENERIC[:4], GENERIC[3::-1], (1,) * 4):
        yield found, _sizes(GENERIC)


@cache
def _sizes(values: tuple[int, ...]) -> Sizes:
    """Symbols for sizes and numbers, whatever a case calls them."""
    return Sizes({f"n{i}": v for i, v in enumerate((*values[:_MOST_SIZES], *NUMBERS))})


def _small_instances(rule: DataRule, random: Random) -> Iterator[Instance]:
    for case in rule.cases:
        symbols = symbols_of(case, label_fields(rule))
        for _ in range(3):
            values = {s: random.choice(_SMALL) for s in symbols}
            yield of_case(rule, case, values)
    yield from _drawn(rule, random, _MOST_ALIKE, (_SMALL[1],))
    yield from _drawn(rule, random, _MOST_DRAWN, _SMALL)


def _drawn(
    rule: DataRule, random: Random, most: int, pool: tuple[int, ...], *others: tuple[int, ...]
) -> Iterator[Instance]:
    """Instances with sizes from a pool, which must be instances with those of other ones too.

    So what holds for symbols does not hang on which of their values is larger, or how large.
    """
    found: set[tuple[Graph, Graph]] = set()
    for _ in range(_DRAWS):
        seed = random.getrandbits(32)
        one = drawn(rule, Random(seed), pool)
        if any(drawn(rule, Random(seed), other) is None for other in others):
            continue
        if one is not None and (one.left, one.right) not in found:
            found.add((one.left, one.right))
            yield one
            if len(found) == most:
                return


def _given(left: Graph, right: Graph) -> Mapping[str, object]:
    """Values for leaves that are no floats; indices are inside what they index."""
    rng, most = np.random.default_rng(0), dict[str, int]()
    for graph in (left, right):
        _lengths(graph, most)
    types = leaves(left).items()
    return {n: rng.integers(0, min(2, most.get(n, 2)), t.shape) for n, t in types if not t.is_float}


def _lengths(graph: Graph, found: dict[str, int]) -> None:
    """How long the axes are that leaves index, by the leaves' names."""
    names = {i: name for name, i in graph.leaves.items()}
    for node in graph.nodes:
        if node.op is EMBEDDING:
            length = graph.type_of(node.operands[0]).shape[0]
        elif isinstance(node.attributes, Gather):
            length = graph.type_of(node.operands[0]).shape[node.attributes.axis]
        elif isinstance(node.attributes, ScatterAdd):
            length = node.attributes.size
        else:
            continue
        name = names.get(node.operands[1].node)
        if name is not None:
            found[name] = min(length, found.get(name, length))


def _described(found: Instance) -> str:
    """Shapes and attributes of an instance."""
    types = leaves(found.left)
    shapes = [f"{n}: {t}" for n, t in types.items()]
    others = [
        f"{n} = {to_text(v)}"
        for n, v in sorted(found.names.items())
        if n not in types and not isinstance(v, TensorType) and not n.endswith("...")
    ]
    return ", ".join([*shapes, *others])
