"""Whether a rule that is data holds: proved for all sizes, tested, or refused with an example."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from random import Random

import numpy as np

from treadle.base.errors import TreadleError
from treadle.domains.domain import evaluate
from treadle.domains.field import equal_graphs, failure_probability
from treadle.domains.float64 import Float64
from treadle.egraph.language import DataRule, to_text
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.verify import normal_form
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
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about a rule."""

    status: Status
    proved: int = 0  # instances with symbols for sizes
    tested: int = 0  # small ones, over the finite field
    assumptions: frozenset[Assumption] = frozenset()
    reason: str = ""

    @property
    def bound(self) -> float:
        """The probability that one of the tested instances is different and was not told apart."""
        return failure_probability(_DEGREE, _TRIALS) * max(1, self.tested)


def prove(rule: DataRule) -> Proof:
    """The rule's cases, and others that are drawn, with symbols for sizes and with small ones.

    Drawing is the same in every process.
    """
    random = Random(zlib.crc32(rule.name.encode()))
    count, made, open_ = 0, set[Assumption](), ""
    try:
        small = list(_small_instances(rule, random))
        symbolic = list(_symbolic_instances(rule, random))
    except NoInstanceError as error:
        return Proof(Status.REFUSED, reason=f"its case is none: {error}")
    for found in small:
        if not equal_graphs(found.left, found.right, _given(found.left), trials=_TRIALS):
            return Proof(Status.REFUSED, tested=len(small), reason=counterexample(found))
    for found, sizes in symbolic:
        try:
            verdict = normal_form.equal(found.left, found.right, sizes=sizes)
        except AmbiguousSizeError as error:
            open_ = str(error)
            continue
        count += verdict.is_proved
        made |= verdict.assumptions
        open_ = open_ or verdict.reason
    if not small:
        return Proof(Status.REFUSED, reason="no instance was found: give it a (case …)")
    status = Status.PROVED if count and count == len(symbolic) else Status.TESTED
    return Proof(
        status, count, len(small), frozenset(made), "" if status is Status.PROVED else open_
    )


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


# Counterexamples


def _leaves(graph: Graph) -> Mapping[str, TensorType]:
    return {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}


def _given(graph: Graph) -> Mapping[str, object]:
    """Values for leaves that are no floats."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 2, t.shape) for name, t in _leaves(graph).items() if not t.is_float
    }


def counterexample(found: Instance) -> str:
    """Shapes, attributes, and small whole numbers for which the sides differ."""
    shapes = ", ".join(f"{n}: {t}" for n, t in _leaves(found.left).items())
    others = ", ".join(
        f"{n} = {to_text(v)}"
        for n, v in sorted(found.names.items())
        if n not in found.left.leaves and not isinstance(v, TensorType) and not n.endswith("...")
    )
    where = f"{shapes}{'; ' if others else ''}{others}"
    values = _differing(found)
    return f"the sides differ for {where}" + (f": {values}" if values else "")


def _differing(found: Instance) -> str:
    rng = np.random.default_rng(0)
    leaves = _leaves(found.left)
    for _ in range(20):
        given = {n: rng.integers(1, 4, t.shape).astype(np.float64) for n, t in leaves.items()}
        try:
            pair = [evaluate(g, given, Float64()) for g in (found.left, found.right)]
        except (TreadleError, ArithmeticError):
            return ""
        for a, b in zip(*pair, strict=True):
            if not np.allclose(a, b, equal_nan=True):
                at = next(zip(*np.nonzero(~np.isclose(a, b, equal_nan=True)), strict=True), ())
                inputs = ", ".join(f"{n} = {np.asarray(v).tolist()}" for n, v in given.items())
                left, right = (float(np.asarray(v)[tuple(map(int, at))]) for v in (a, b))
                return f"with {inputs} they are {left:g} and {right:g}"
    return ""
