"""The checker's meaning of every op beside the compiler's: they share nothing but the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
import treadle.tables as tables
import treadle.verify.samples as every_sample
from treadle.autodiff.backward import differentiate
from treadle.domains.domain import evaluate
from treadle.domains.field import FiniteField, Residues
from treadle.ir.composites import DEFINITIONS
from treadle.ir.op import OPS, Op
from treadle.ir.ops.leaves import NAMED_LEAVES
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.reads import ORDERS, is_read
from treadle.verify.sampling import SAMPLES, Sample, sample_graph
from treadle_checker.elements import Elements
from treadle_checker.field import Element, Field, same
from treadle_checker.graph import SCHEMA, read_graph
from treadle_checker.randomness import is_prime, safe_prime, seeded
from treadle_checker.reading import Rejected
from treadle_checker.relations import check_derived, with_gradients
from treadle_checker.types import Graph, Value

assert tables, every_sample  # they fill the tables
# The sum over shards is the identity of one shard to the compiler, and a factor to the checker, which
# so tells one that is missing.
COMPUTED = sorted(
    op.name
    for op in OPS.values()
    if op in SAMPLES and op not in NAMED_LEAVES and op.name != "shard_sum"
)


def read(records: Records, name: str) -> Graph:
    return read_graph(json.loads(records.texts[name]), lambda inner: read(records, inner), name)


def check_sample(op: Op, sample: Sample) -> None:
    """All elements, and some that are asked for by themselves."""
    graph, records = sample_graph(op, sample), Records()
    known = read(records, records.graph(graph))
    field, rng = FiniteField(0), np.random.default_rng(0)
    own = Field(0)  # with the same primes and keys
    for lane, of in ((own.p, field.lane_p), (own.q, field.lane_q)):
        lane.modulus, lane.key = of.modulus, of.key
    arrays = sample.arrays()
    given = {
        str(i): field.random(d.type, rng) if d.type.is_float else field.lift(arrays[str(i)], d.type)
        for i, d in enumerate(sample.operands)
    }

    def source(value: Value) -> Callable[[np.ndarray], Element] | None:
        node = known.nodes[value.node]
        return _held(given[node.attributes["name"]]) if node.op == "input" else None

    for wanted, (_, _, value) in zip(evaluate(graph, given, field), known.outputs, strict=True):
        expected = _held(wanted)(np.arange(np.size(wanted.p)))
        found = Elements(known, own, source).whole(value)
        assert same(_plain(found), expected), (op.name, sample.attributes)
        some = rng.integers(0, max(1, len(found.p)), min(7, len(found.p)))
        alone = Elements(known, own, source).at(value, some)
        assert same(_plain(alone), expected.map(lambda a, at=some: a[at]))  # type: ignore[misc]


def _held(x: Residues) -> Callable[[np.ndarray], Element]:
    q, p = np.asarray(x.q).reshape(-1), np.asarray(x.p).reshape(-1)
    sign = None if x.sign is None else np.asarray(x.sign).reshape(-1)
    return lambda at: Element(q[at], p[at], None if sign is None else sign[at])


def _plain(x: Element) -> Element:
    """The compiler's field has generic elements where the checker has infinities."""
    return replace(x, infinite=None)


def samples_of(op: Op) -> list[Sample]:
    found = list(SAMPLES[op]())
    # −∞ in the padding is the least element to the checker, and a generic one to the compiler.
    return [
        s for s in found if not any(getattr(s.attributes, "padding", ())) or op.name != "max_pool"
    ]


def test_the_checker_knows_every_op() -> None:
    """Primitives by name or by what they read; a composite is a call of its definition."""
    named = (op for op in OPS.values() if op not in DEFINITIONS and op not in ORDERS)
    reductions = {"reduce_sum", "reduce_prod", "reduce_max", "reduce_min"}
    known = {op.name for op in named if not is_read(op)}
    assert SCHEMA.keys() == known | reductions | {"move", "order"}


@pytest.mark.parametrize("name", COMPUTED)
def test_meanings_agree(name: str) -> None:
    if name == "eq":
        return  # the compiler's field decides it, the checker's has a generic flag
    for sample in samples_of(OPS[name])[:2]:
        check_sample(OPS[name], sample)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
def test_meanings_agree_on_all_samples(name: str) -> None:
    for sample in samples_of(OPS[name]):
        check_sample(OPS[name], sample)


def product(op: str, depth: int, guards: list[object]) -> Graph:
    """Of a 4 × 3 and a 3 × 5 matrix, over some of the depth."""
    shapes, reads = ([4, 3], [3, 5]), ([0, [3, "0"], [1, "2"]], [0, [5, "2"], [1, "1"]])
    leaves = []
    for name, shape in zip("xy", shapes, strict=True):
        type_ = ["float32", shape]
        leaves.append(["input", {"name": name, "type": type_}, [], [type_], -1])
    attributes = {
        "name": "product", "shape": [4, 5], "over": [depth], "indices": 0, "value": 0,
        "reads": [[guards, address] for address in reads], "dtype": "float32",
    }  # fmt: skip
    node = [op, attributes, [[0, 0], [1, 0]], [["float32", [4, 5]]], -1]
    outputs = [["result", "0", [2, 0]]]
    record = {"name": "", "lines": [], "nodes": [*leaves, node], "outputs": outputs}
    return read_graph(record, lambda name: read(Records(), name))


@pytest.mark.parametrize("op", ["reduce_sum", "reduce_max"])
def test_guards_hold_in_products(op: str) -> None:
    """Terms that are not read are zeros, whether a product is one of matrices or not."""

    def found(graph: Graph, negated: bool = False) -> Element:
        field = Field(0)

        def given(value: Value) -> Callable[[np.ndarray], Element] | None:
            if value.node == 2:
                return None
            return lambda at: field.integers(
                (at + 1) * (-1 if negated and value.node else 1), "float32"
            )

        return Elements(graph, field, given).whole(Value(2))

    guarded, shorter = product(op, 3, [[[0, [1, "2"]], 0, 2]]), product(op, 2, [])
    assert same(found(guarded), found(shorter))
    assert not same(found(product(op, 3, [])), found(shorter))
    below_zero = same(found(guarded, True), found(shorter, True))
    assert below_zero == (op == "reduce_sum")  # a zero is more than what is negative


def by_division(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def test_primes_are_told_from_other_numbers() -> None:
    strong = [2047, 1373653, 25326001, 1194649, 12327121]  # composite; some bases err on them
    for n in [*range(3000), *strong, 2**31 - 1, 2**31 - 3, 46337**2]:
        assert is_prime(n) == by_division(n), n


def test_primes_are_safe_and_drawn() -> None:
    found = []
    for seed in range(8):
        with seeded(seed):
            found += [safe_prime(0), safe_prime(1)]
    assert len(set(found)) == 16
    assert all(2**30 < p < 2**31 for p in found)
    assert all(by_division(p) and by_division((p - 1) // 2) for p in found)


SMOOTH = {
    "neg": lambda x, y: -x, "add": lambda x, y: x + y, "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "mod": lambda x, y: x % y,
    "where": lambda x, y: td.where(x < y, x, y), "max": td.maximum, "min": td.minimum,
    "pow": lambda x, y: x**y, "atan2": td.atan2, "abs": lambda x, y: td.abs(x),
    "exp": lambda x, y: td.exp(x), "log": lambda x, y: td.log(x), "sqrt": lambda x, y: td.sqrt(x),
    "rsqrt": lambda x, y: td.rsqrt(x), "sin": lambda x, y: td.sin(x),
    "cos": lambda x, y: td.cos(x), "tanh": lambda x, y: td.tanh(x), "erf": lambda x, y: td.erf(x),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_agree_with_the_compilers(name: str) -> None:
    """Of every op that has a derivative; a gradient that is twice as large does not agree."""

    def both(factor: float) -> tuple[Graph, Graph]:
        def total(x, y):
            found = SMOOTH[name](x * y, y + x) * factor
            return (found * td.stop_gradient(found) * x).sum()

        graph, records = td.trace(total, td.Spec((3,)), td.Spec((3,))), Records()
        after = differentiate(graph, list(graph.leaves)).graph
        loss, gradients = (read(records, records.graph(g)) for g in (graph, after))
        return loss, gradients

    (loss, gradients), (twice, _) = both(1.0), both(2.0)
    check_derived(with_gradients(loss, gradients, (), (), ()), gradients)
    with pytest.raises(Rejected):
        check_derived(with_gradients(twice, gradients, (), (), ()), gradients)
