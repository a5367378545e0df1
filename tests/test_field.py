"""Exact equality over finite fields: what must hold holds, and wrong variants are told apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from graphs import random_graph
from test_ops import check_adjoint
from treadle.domains.domain import evaluate
from treadle.domains.field import (
    SAFE_PRIMES,
    FiniteField,
    Lane,
    Residues,
    equal_graphs,
    failure_probability,
    same,
)
from treadle.domains.float64 import evaluate_float64
from treadle.ir.types import TensorType

Spec = td.Spec


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@pytest.mark.parametrize("p", SAFE_PRIMES)
def test_the_primes_are_safe_primes_near_2_31(p: int) -> None:
    assert is_prime(p)
    assert is_prime((p - 1) // 2)
    assert 2**31 - 2**14 < p < 2**31


@given(st.integers(0, 2**63), st.sampled_from(SAFE_PRIMES))
@settings(max_examples=50, deadline=None)
def test_products_are_exact(seed: int, modulus: int) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = rng.integers(1, 40, 3)
    x, y = rng.integers(0, modulus, (1, m, k)), rng.integers(0, modulus, (1, k, n))
    expected = (x[0].astype(object) @ y[0].astype(object)) % modulus
    assert (Lane(modulus, 0).matmul(x, y)[0] == expected).all()


def test_long_products_are_exact() -> None:
    modulus = SAFE_PRIMES[0]
    worst = np.full((1, 1, 5000), modulus - 1)
    found = Lane(modulus, 0).matmul(worst, worst.transpose(0, 2, 1))
    assert int(found[0, 0, 0]) == 5000 % modulus


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_exp_and_log_are_inverse_homomorphisms(seed: int) -> None:
    field, rng = FiniteField(0), np.random.default_rng(seed)
    t = TensorType((4,))
    inputs = {"x": field.random(t, rng), "y": field.random(t, rng)}

    def value(function) -> Residues:
        return evaluate(td.trace(function, t, t), inputs, field)[0]

    def equal(f, g) -> bool:
        return same(value(f), value(g))

    assert equal(lambda x, y: td.exp(x + y), lambda x, y: td.exp(x) * td.exp(y))
    assert equal(lambda x, y: td.exp(-x), lambda x, y: 1 / td.exp(x))
    assert equal(lambda x, y: td.log(x * y), lambda x, y: td.log(x) + td.log(y))
    assert equal(lambda x, y: td.log(td.exp(x)), lambda x, y: x)
    assert equal(lambda x, y: td.exp(td.log(x)), lambda x, y: x)
    assert equal(lambda x, y: td.exp(y - td.log(x)), lambda x, y: td.exp(y) / x)
    assert not equal(lambda x, y: td.exp(x * y), lambda x, y: td.exp(x) * td.exp(y))
    assert not equal(lambda x, y: td.log(x + y), lambda x, y: td.log(x) + td.log(y))


def test_dyadic_and_rational_constants_are_exact() -> None:
    t = TensorType((2,))
    assert equal_graphs(td.trace(lambda x: x * 0.375, t), td.trace(lambda x: x * 3 / 8, t))
    assert equal_graphs(td.trace(lambda x: x.mean() * 2, t), td.trace(lambda x: x.sum(), t))
    # 0.1 is not a tenth: the field knows.
    assert not equal_graphs(td.trace(lambda x: x * 0.1, t), td.trace(lambda x: x / 10, t))


PIECEWISE_EQUAL = [
    (lambda x: td.relu(x), lambda x: td.where(x > 0, x, 0)),
    (lambda x: td.relu(x), lambda x: td.maximum(x, 0)),
    (lambda x: td.relu(x), lambda x: (x + td.abs(x)) / 2),
    (lambda x: td.abs(x), lambda x: x * td.sign(x)),
    (lambda x: td.maximum(x, x * x), lambda x: td.maximum(x * x, x)),
    (lambda x: td.minimum(x, x * x), lambda x: -td.maximum(-x, -x * x)),
    (lambda x: td.maximum(x, x * x) + 3, lambda x: td.maximum(3 + x, x * x + 3)),
    (lambda x: td.sort(x)[0][-1], lambda x: td.max(x)),
    (lambda x: td.max(x), lambda x: td.max(td.flip(x))),
    (lambda x: td.where((x > 0) & (x > 1), x, 0), lambda x: td.where((x > 1) & (x > 0), x, 0)),
    (lambda x: td.where(td.logical_not(x > 0), 0, x), lambda x: td.where(x > 0, x, 0)),
]
PIECEWISE_DIFFERENT = [
    (lambda x: td.relu(x), lambda x: x),
    (lambda x: td.relu(x), lambda x: td.minimum(x, 0)),
    (lambda x: td.abs(x), lambda x: x),
    (lambda x: td.max(x), lambda x: td.min(x)),
    (lambda x: td.where(x > 0, x, 0), lambda x: td.where(x > 1, x, 0)),
    (lambda x: td.where(x > 0, x, 1), lambda x: td.where(x > 0, x, 2)),
    (lambda x: td.where(x > 0, x, 1), lambda x: td.where(x > 0, 2 * x, 1)),
    (lambda x: x > 0, lambda x: x < 0),
    (lambda x: td.tanh(x), lambda x: td.sin(x)),
]


@pytest.mark.parametrize(("f", "g"), PIECEWISE_EQUAL)
def test_order_agrees_with_itself(f, g) -> None:
    assert equal_graphs(td.trace(f, Spec((4,))), td.trace(g, Spec((4,))))


@pytest.mark.parametrize(("f", "g"), PIECEWISE_DIFFERENT)
def test_different_functions_differ(f, g) -> None:
    assert not equal_graphs(td.trace(f, Spec((4,))), td.trace(g, Spec((4,))))


def test_one_scalar_trial_finds_a_difference_in_either_branch() -> None:
    """The guarantee is Schwartz and Zippel's, not that of a lucky sign: no branch is skipped."""
    right = td.trace(lambda x: td.where(x > 0, x, 1), Spec(()))
    for wrong in (lambda x: td.where(x > 0, x, 2), lambda x: td.where(x > 0, x * x, 1)):
        graph = td.trace(wrong, Spec(()))
        assert not any(equal_graphs(right, graph, trials=1, seed=s) for s in range(50))


def test_a_maximum_that_misses_an_element_is_found_by_trials() -> None:
    f, g = td.trace(lambda x: td.max(x), Spec((4,))), td.trace(lambda x: td.max(x[:3]), Spec((4,)))
    assert not equal_graphs(f, g, trials=40)


def test_softmax_shift_cancels_exactly() -> None:
    x, c = Spec((3, 5)), Spec((3, 1))

    def total(x):
        return td.exp(x).sum(-1, keepdims=True)

    plain = td.trace(lambda x, c: td.softmax(x), x, c)
    assert equal_graphs(plain, td.trace(lambda x, c: td.softmax(x + c), x, c))
    assert equal_graphs(
        plain, td.trace(lambda x, c: td.exp(x) / td.exp(x).sum(-1, keepdims=True), x, c)
    )
    assert not equal_graphs(plain, td.trace(lambda x, c: td.softmax(x * c), x, c))
    assert not equal_graphs(plain, td.trace(lambda x, c: td.softmax(x, 0), x, c))
    assert not equal_graphs(plain, td.trace(lambda x, c: td.exp(x) / td.exp(x).sum(), x, c))


def flash_attention(q, k, v, block: int, rescale: bool = True):
    """Streaming over blocks of keys with a running maximum and a running sum, causal."""
    t, d = q.shape[-2:]
    top = td.full((*q.shape[:-1], 1), -1e30)
    total, out = td.zeros((*q.shape[:-1], 1)), td.zeros(q.shape)
    rows = td.iota((t, block), 0)
    for start in range(0, k.shape[-2], block):
        kb, vb = k[:, :, start : start + block], v[:, :, start : start + block]
        scores = td.einsum("bhtd,bhsd->bhts", q, kb) * d**-0.5
        seen = td.iota((t, block), 1) + start <= rows
        highest = td.maximum(top, td.where(seen, scores, -1e30).max(-1, keepdims=True))
        factor = td.exp(top - highest) if rescale else 1.0
        weights = td.where(seen, td.exp(scores - highest), 0)
        total = total * factor + weights.sum(-1, keepdims=True)
        out = out * factor + td.einsum("bhts,bhsd->bhtd", weights, vb)
        top = highest
    return out / total


def test_flash_attention_equals_plain_attention_exactly() -> None:
    shape = Spec((1, 2, 6, 2))

    def graph(function):
        return td.trace(function, shape, shape, shape)

    plain = graph(lambda q, k, v: td.attention(q, k, v, causal=True))
    assert equal_graphs(plain, graph(lambda q, k, v: flash_attention(q, k, v, 2)))
    assert equal_graphs(plain, graph(lambda q, k, v: flash_attention(q, k, v, 3)))
    assert not equal_graphs(
        plain, graph(lambda q, k, v: flash_attention(q, k, v, 2, rescale=False))
    )
    assert not equal_graphs(plain, graph(lambda q, k, v: td.attention(q, k, v)))
    assert not equal_graphs(
        plain, graph(lambda q, k, v: td.attention(q, k, v, causal=True, scale=1))
    )


def streaming_logsumexp(x, block: int, keep_sum: bool = True):
    top, total = td.full((x.shape[0],), -1e30), td.zeros((x.shape[0],))
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block]
        highest = td.maximum(top, part.max(1))
        old = total * td.exp(top - highest) if keep_sum else 0
        total = old + td.exp(part - highest[:, None]).sum(1)
        top = highest
    return top + td.log(total)


def test_streaming_logsumexp_equals_plain_exactly() -> None:
    x = Spec((2, 6))
    plain = td.trace(lambda x: td.logsumexp(x, 1), x)
    assert equal_graphs(plain, td.trace(lambda x: streaming_logsumexp(x, 2), x))
    assert equal_graphs(plain, td.trace(lambda x: streaming_logsumexp(x, 4), x))
    assert equal_graphs(plain, td.trace(lambda x: td.log(td.exp(x).sum(1)), x))
    assert not equal_graphs(plain, td.trace(lambda x: streaming_logsumexp(x, 2, keep_sum=False), x))
    assert not equal_graphs(plain, td.trace(lambda x: td.logsumexp(x, 1) * 2, x))


@given(st.integers(0, 2**32), st.integers(2, 10))
@settings(max_examples=300, deadline=None)
def test_adjoint_is_exact_on_polynomial_graphs(seed: int, steps: int) -> None:
    graph = random_graph(seed, steps, polynomial=True)
    assert check_adjoint(graph, _inputs(graph, seed), seed) == (True, True)


@given(st.integers(0, 2**32), st.integers(2, 10))
@settings(max_examples=300, deadline=None)
def test_adjoint_is_exact_on_random_graphs(seed: int, steps: int) -> None:
    graph = random_graph(seed, steps)
    assert any(check_adjoint(graph, _inputs(graph, seed), seed))


def _inputs(graph, seed: int) -> dict[str, Residues]:
    field, rng = FiniteField(seed), np.random.default_rng(seed)
    return {n: field.random(graph.nodes[i].types[0], rng) for n, i in graph.leaves.items()}


def test_the_field_agrees_with_the_oracle_on_whole_numbers() -> None:
    """A polynomial with whole coefficients has the same value in both, below the modulus."""
    rng = np.random.default_rng(0)
    function = td.trace(lambda a, b: a @ b * 3 - (a * b).sum(0), Spec((3, 3)), Spec((3, 3)))
    arrays = {n: rng.integers(-9, 10, (3, 3)).astype(float) for n in ("a", "b")}
    field = FiniteField(0)
    (exact,) = evaluate_float64(function, arrays)
    lifted = {n: field.lift(a, Spec((3, 3))) for n, a in arrays.items()}
    (residues,) = evaluate(function, lifted, field)
    np.testing.assert_array_equal(field.order(residues), exact)


def test_failure_probability() -> None:
    assert failure_probability(100, 1) == pytest.approx(150 / 2**30, rel=1e-4)
    assert failure_probability(100, 3) == pytest.approx((150 / 2**30) ** 3, rel=1e-3)
