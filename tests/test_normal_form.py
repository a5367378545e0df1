"""The normal form: equal functions have one, others do not, for all sizes and for given ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest

import treadle as td
from normal_form_values import UnknownMeaningError, value_of
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind, bind1
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.op import NONE, OPS, Op
from treadle.ir.ops.leaves import Leaf
from treadle.verify import normal_form as nf
from treadle.verify.normal_form import Assumption, Outcome
from treadle.verify.normal_form.sizes import AmbiguousSizeError
from treadle.verify.samples import SAMPLES
from treadle.verify.sampling import sample_graph

Function = Callable[..., Any]
# Sizes that stand for symbols: `nf.generic` gives them these values.
SIZES = nf.generic("nmkp")
N, M, K, P = SIZES.values.values()
ROUNDED, SATURATING = Assumption.ROUNDED_CONSTANTS, Assumption.SATURATING_MASK


def spec(*shape: int, dtype: Any = td.float32) -> td.Spec:
    return td.Spec(shape, dtype)


def traced(function: Function, specs: tuple[td.Spec, ...]) -> Graph:
    """The graph of a function whose inputs go by their place."""
    names = [f"a{i}" for i in range(len(specs))]
    scope: dict[str, Any] = {"function": function}
    exec(f"def wrapped({', '.join(names)}): return function({', '.join(names)})", scope)
    return td.trace(scope["wrapped"], *specs)


def verdict(
    left: Function, right: Function, *specs: td.Spec, allowed: tuple[Assumption, ...] = ()
) -> nf.Verdict:
    return nf.equal(traced(left, specs), traced(right, specs), nf.EXACT | set(allowed), SIZES)


def softmax(x: td.Tensor) -> td.Tensor:
    e = td.exp(x)
    return e / td.sum(e, -1, keepdims=True)


def layer_norm(x: td.Tensor, w: td.Tensor, b: td.Tensor) -> td.Tensor:
    return bind1(c.LAYER_NORM, c.Norm(1, 1e-5), x, w, b)


def norm_by_var(x: td.Tensor, w: td.Tensor, b: td.Tensor) -> td.Tensor:
    variance = td.var(x, -1, correction=0, keepdims=True)
    return (x - td.mean(x, -1, keepdims=True)) / td.sqrt(variance + 1e-5) * w + b


def norm_by_squares(x: td.Tensor, w: td.Tensor, b: td.Tensor) -> td.Tensor:
    mean = td.mean(x, -1, keepdims=True)
    variance = td.mean(x * x, -1, keepdims=True) - mean * mean
    return w * ((x - mean) * td.rsqrt(variance + 1e-5)) + b


def attention(causal: bool) -> Function:
    return lambda q, k, v: bind(c.ATTENTION, c.Attention(0.125, causal), q, k, v)[0]


def by_hand(mask: str) -> Function:
    def function(q: td.Tensor, k: td.Tensor, v: td.Tensor) -> td.Tensor:
        scores = (q @ k.transpose(-1, -2)) * 0.125
        shape = scores.shape[-2:]
        seen = td.iota(shape, 1) <= td.iota(shape, 0)
        match mask:
            case "where":
                scores = td.where(seen, scores, -math.inf)
            case "added":
                scores = scores + td.where(seen, 0.0, -math.inf)
            case "finite":
                scores = td.where(seen, scores, -1e9)
            case "inverted":
                scores = td.where(seen, -math.inf, scores)
            case "factor":
                weights = td.exp(scores) * td.cast(seen, td.float32)
                return (weights / td.sum(weights, -1, keepdims=True)) @ v
        return td.softmax(scores, -1) @ v

    return function


def shifted_conv(x: td.Tensor, w: td.Tensor) -> td.Tensor:
    wide = td.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    h, v = x.shape[2:]
    parts = [
        td.einsum("bchw,oc->bohw", wide[:, :, i : i + h, j : j + v], w[:, :, i, j])
        for i in range(3)
        for j in range(3)
    ]
    return sum(parts[1:], parts[0])


def repeated_heads(q: td.Tensor, k: td.Tensor, v: td.Tensor) -> td.Tensor:
    b, g, t, d = k.shape
    k, v = (x.unsqueeze(2).expand(b, g, 3, t, d).reshape(b, 3 * g, t, d) for x in (k, v))
    return td.softmax((q @ k.transpose(-1, -2)) * 0.125, -1) @ v


def packed(x: td.Tensor, a: td.Tensor, b: td.Tensor) -> td.Tensor:
    both, size = x @ td.concat([a, b], 1), a.shape[1]
    return td.silu(both[:, :size]) * both[:, size:]


def cross_entropy(z: td.Tensor, y: td.Tensor) -> td.Tensor:
    return bind1(c.CROSS_ENTROPY, c.CrossEntropy(0.0), z, y)


def chosen(z: td.Tensor, y: td.Tensor) -> td.Tensor:
    found = td.take_along_axis(td.log(softmax(z)), y.unsqueeze(-1), -1)
    return -found.reshape(y.shape)


class Pair(NamedTuple):
    left: Function
    right: Function
    specs: tuple[td.Spec, ...]


MATRIX, ROW = spec(N, M), spec(M)
HEADS = (spec(P, 4, N, M),) * 3
LABELS = spec(N, dtype=td.int32)
EQUAL = {
    "softmax without its shift": Pair(softmax, lambda x: td.softmax(x, -1), (MATRIX,)),
    "log of softmax": Pair(
        lambda x: td.log(softmax(x)), lambda x: td.log_softmax(x, -1), (MATRIX,)
    ),
    "logsumexp": Pair(
        lambda x: td.log(td.sum(td.exp(x), -1)), lambda x: td.logsumexp(x, -1), (MATRIX,)
    ),
    "(ab)c = a(bc)": Pair(
        lambda a, b, d: (a @ b) @ d, lambda a, b, d: a @ (b @ d), (MATRIX, spec(M, K), spec(K, P))
    ),
    "(ab)ᵀ = bᵀaᵀ": Pair(
        lambda a, b: (a @ b).T, lambda a, b: b.T @ a.T, (MATRIX, spec(M, K))
    ),
    "columns joined": Pair(
        lambda x, a, b: td.concat([x @ a, x @ b], 1),
        lambda x, a, b: x @ td.concat([a, b], 1),
        (MATRIX, spec(M, K), spec(M, P)),
    ),
    "swiglu of joined weights": Pair(
        lambda x, a, b: td.silu(x @ a) * (x @ b), packed, (MATRIX, spec(M, K), spec(M, K))
    ),
    "the sum of a concatenation": Pair(
        lambda a, b: td.sum(td.concat([a, b], 1), 1),
        lambda a, b: td.sum(a, 1) + td.sum(b, 1),
        (MATRIX, spec(N, K)),
    ),
    "the sum of a pad": Pair(
        lambda a: td.sum(td.pad(a, ((0, 0), (2, 3))), 1), lambda a: td.sum(a, 1), (MATRIX,)
    ),
    "a function of parts": Pair(
        lambda a, b: td.tanh(td.concat([a, b], 0)),
        lambda a, b: td.concat([td.tanh(a), td.tanh(b)], 0),
        (spec(N), spec(M)),
    ),
    "a sum over merged axes": Pair(
        lambda a: td.sum(a.reshape(N, M * K), 1), lambda a: td.sum(a, (1, 2)), (spec(N, M, K),)
    ),
    "reshapes of reshapes": Pair(
        lambda a: a.reshape(N * M, K).reshape(N, M * K),
        lambda a: a.reshape(N, M * K),
        (spec(N, M, K),),
    ),
    "layer norm by the variance": Pair(norm_by_var, layer_norm, (MATRIX, ROW, ROW)),
    "layer norm by squares": Pair(norm_by_squares, layer_norm, (MATRIX, ROW, ROW)),
    "silu": Pair(lambda x: x / (1 + td.exp(-x)), lambda x: bind1(c.SILU, NONE, x), (MATRIX,)),
    "silu by exp": Pair(
        lambda x: x * td.exp(x) / (1 + td.exp(x)), lambda x: bind1(c.SILU, NONE, x), (MATRIX,)
    ),
    "1 − sigmoid(x) = sigmoid(−x)": Pair(
        lambda x: 1 - td.sigmoid(x), lambda x: td.sigmoid(-x), (MATRIX,)
    ),
    "gelu by tanh": Pair(
        lambda x: 0.5 * x * (1 + td.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: bind1(c.GELU, c.Gelu("tanh"), x),
        (MATRIX,),
    ),
    "attention": Pair(by_hand(""), attention(False), HEADS),
    "attention masked by where": Pair(by_hand("where"), attention(True), HEADS),
    "attention with an added mask": Pair(by_hand("added"), attention(True), HEADS),
    "attention with a mask of factors": Pair(by_hand("factor"), attention(True), HEADS),
    "attention with repeated heads": Pair(
        repeated_heads, attention(False), (spec(P, 6, N, M), spec(P, 2, N, M), spec(P, 2, N, M))
    ),
    "cross-entropy at the label": Pair(chosen, cross_entropy, (MATRIX, LABELS)),
    "cross-entropy of one-hot labels": Pair(
        lambda z, y: -td.sum(td.log_softmax(z, -1) * td.one_hot(y, M), -1),
        cross_entropy,
        (MATRIX, LABELS),
    ),
    "relu by max": Pair(lambda x: td.maximum(x, 0.0), td.relu, (MATRIX,)),
    "relu by where": Pair(lambda x: td.where(x > 0, x, 0.0), td.relu, (MATRIX,)),
    "abs by where": Pair(lambda x: td.where(x < 0, -x, x), td.abs, (MATRIX,)),
    "max of three": Pair(
        lambda a, b, d: td.maximum(a, td.maximum(b, d)),
        lambda a, b, d: td.maximum(td.maximum(d, a), b),
        (ROW, ROW, ROW),
    ),
    "max of shifted": Pair(
        lambda a, b, d: td.maximum(td.maximum(a + d, b + d), d),
        lambda a, b, d: td.maximum(td.maximum(a, b), 0.0) + d,
        (ROW, ROW, ROW),
    ),
    "max twice": Pair(
        lambda a, b: td.maximum(a, td.maximum(a, b)), td.maximum, (ROW, ROW)
    ),
    "maximum of shifted rows": Pair(
        lambda a, b: td.max(a + b.unsqueeze(1), 1), lambda a, b: td.max(a, 1) + b, (MATRIX, spec(N))
    ),
    "maximum of exp": Pair(
        lambda a: td.max(td.exp(a), 1), lambda a: td.exp(td.max(a, 1)), (MATRIX,)
    ),
    "maxima of maxima": Pair(
        lambda a: td.max(td.max(a, 2), 1),
        lambda a: td.max(a.reshape(N, M * K), 1),
        (spec(N, M, K),),
    ),
    "convolution by shifts": Pair(
        shifted_conv, lambda x, w: td.conv(x, w, padding=1), (spec(P, K, N, M), spec(K, K, 3, 3))
    ),
    "average pooling": Pair(
        lambda x: td.mean(x.reshape(N, M, 4, 2, 4, 2), (3, 5)),
        lambda x: td.avg_pool(x, 2),
        (spec(N, M, 8, 8),),
    ),
    "rotation by halves": Pair(
        lambda x, p, q: td.concat(
            [x[:, :M] * p - x[:, M:] * q, x[:, M:] * p + x[:, :M] * q], 1
        ),
        lambda x, p, q: x * td.concat([p, p], 1)
        + td.concat([-x[:, M:], x[:, :M]], 1) * td.concat([q, q], 1),
        (spec(N, 2 * M), MATRIX, MATRIX),
    ),
    "the last of cumulative sums": Pair(
        lambda x: td.cumsum(x, 0)[-1], lambda x: td.sum(x, 0), (MATRIX,)
    ),
    "cumulative sums by a triangle": Pair(
        lambda x: td.cast(td.iota((N, N), 1) <= td.iota((N, N), 0), td.float32) @ x,
        lambda x: td.cumsum(x, 0),
        (MATRIX,),
    ),
    "a flip back": Pair(lambda x: td.flip(td.flip(x, (0,)), (0,)), lambda x: x, (MATRIX,)),
    "sums of sums": Pair(
        lambda a: td.sum(td.tanh(td.sum(a, 1))), lambda a: td.sum(td.tanh(td.sum(a * 1.0, 1))),
        (MATRIX,),
    ),
}  # fmt: skip

# Ops of which a normal form knows only that equal operands give equal results.
WHOLE = frozenset(
    "and or xor cast scan reduce_prod argmax argmin sort top_k random_bits dynamic_slice "
    "dynamic_update_slice shard_sum".split()
)

DIFFERENT = {
    "variance of n − 1": Pair(
        lambda x, w, b: (x - td.mean(x, -1, keepdims=True))
        / td.sqrt(td.var(x, -1, correction=1, keepdims=True) + 1e-5) * w + b,
        layer_norm,
        (spec(4, 6), spec(6), spec(6)),
    ),
    "epsilon outside the root": Pair(
        lambda x, w, b: (x - td.mean(x, -1, keepdims=True))
        / (td.sqrt(td.var(x, -1, correction=0, keepdims=True)) + 1e-5) * w + b,
        layer_norm,
        (spec(4, 6), spec(6), spec(6)),
    ),
    "softmax over the other axis": Pair(
        softmax, lambda x: td.softmax(x, 0), (spec(5, 5),)
    ),
    "attention without its mask": Pair(by_hand(""), attention(True), (spec(1, 1, 2, 2),) * 3),
    "an inverted mask": Pair(by_hand("inverted"), attention(True), (spec(1, 1, 2, 2),) * 3),
    "the other axis of a nested sum": Pair(
        lambda a: td.sum(td.tanh(td.sum(a, 1))), lambda a: td.sum(td.tanh(td.sum(a, 0))),
        (spec(5, 5),),
    ),
    "a sum of products": Pair(
        lambda a, b: td.sum(a * b, 1), lambda a, b: td.sum(a, 1) * td.sum(b, 1),
        (spec(5, 6), spec(5, 6)),
    ),
    "max for min": Pair(td.maximum, td.minimum, (spec(3), spec(3))),
    "a shifted diagonal": Pair(
        lambda x: td.where(td.iota((4, 4), 1) < td.iota((4, 4), 0), x, 0.0),
        lambda x: td.where(td.iota((4, 4), 1) <= td.iota((4, 4), 0), x, 0.0),
        (spec(4, 4),),
    ),
    "the root of a square": Pair(lambda x: td.sqrt(x * x), lambda x: x, (spec(3),)),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_are_proved_equal_for_all_sizes(name: str) -> None:
    left, right, specs = EQUAL[name]
    found = verdict(left, right, *specs)
    assert found.is_proved, found.reason
    assert found.assumptions <= nf.EXACT


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_functions_are_never_proved_equal(name: str) -> None:
    left, right, specs = DIFFERENT[name]
    graphs = traced(left, specs), traced(right, specs)
    everything = frozenset(Assumption)
    found = nf.equal(*graphs, everything, evaluate=True)
    assert found.outcome is Outcome.DIFFERENT, found
    assert nf.of(graphs[0], everything) != nf.of(graphs[1], everything)


def graphs_of(op: Op) -> Iterator[tuple[Graph, dict[str, np.ndarray]]]:
    """Few small samples of an op."""
    samples = (s for s in SAMPLES[op]() if s.operands and not isinstance(s.attributes, Leaf))
    drawn = ((sample_graph(op, s), s.arrays()) for s in samples)
    return islice((g for g in drawn if 0 < sum(t.size for t in g[0].output_types) <= 24), 2)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op in SAMPLES], ids=str)
def test_a_normal_form_has_the_values_of_the_oracle(op: Op) -> None:
    for graph, arrays in graphs_of(op):
        for unrolled in (0, 3):
            form = nf.of(graph, unrolled=unrolled)
            if form is None:
                continue
            for output, exact in enumerate(evaluate_float64(graph, arrays)):
                for at in places(exact.shape):
                    try:
                        found = value_of(form, output, at, arrays)
                    except UnknownMeaningError:
                        assert op.name in WHOLE
                        break
                    if np.isfinite(exact[at]):
                        assert found == pytest.approx(float(exact[at]), 1e-6, 1e-8), at


def places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A few elements, the first and the last among them."""
    every = list(np.ndindex(shape))
    return sorted({every[round(i * (len(every) - 1) / 4)] for i in range(5)}) if every else []


def test_rounded_constants_are_an_assumption() -> None:
    def erf_gelu(x: td.Tensor, scale: float = 0.70710678) -> td.Tensor:
        return x * 0.5 * (1 + td.erf(x * scale))

    pair = erf_gelu, lambda x: bind1(c.GELU, c.Gelu(), x)
    assert not verdict(*pair, ROW).is_proved
    found = verdict(*pair, ROW, allowed=(ROUNDED,))
    assert found.is_proved
    assert found.assumptions == {ROUNDED}
    near = lambda x: erf_gelu(x, 0.7072)  # noqa: E731
    assert not verdict(near, pair[1], ROW, allowed=(ROUNDED,)).is_proved


def test_a_saturating_mask_is_an_assumption() -> None:
    pair = by_hand("finite"), attention(True)
    assert not verdict(*pair, *HEADS).is_proved
    found = verdict(*pair, *HEADS, allowed=(SATURATING,))
    assert found.is_proved
    assert found.assumptions == {SATURATING}


def test_saturating_numbers_are_numbers_elsewhere() -> None:
    found = verdict(lambda x: x * -1e9, lambda x: x * -1e30, ROW, allowed=(SATURATING,))
    assert not found.is_proved


def test_indices_in_range_are_an_assumption() -> None:
    left, right, specs = EQUAL["cross-entropy of one-hot labels"]
    assert verdict(left, right, *specs).assumptions == {Assumption.INDICES_IN_RANGE}
    graphs = traced(left, specs), traced(right, specs)
    assert not nf.equal(*graphs, allowed=(), sizes=SIZES).is_proved


def test_normal_forms_are_looked_up_by_hash() -> None:
    graphs = [traced(f, (spec(4, 6),)) for f in (softmax, lambda x: td.softmax(x, -1), td.tanh)]
    one, same, other = map(nf.of, graphs)
    assert {one: "softmax"}[same] == "softmax"
    assert other not in {one: "softmax"}


def test_ops_of_which_nothing_is_known_are_functions_of_their_operands() -> None:
    def sorted_after(scale: float) -> Function:
        return lambda x: td.sort(x * scale / 2, 0)[0]

    assert verdict(sorted_after(2), lambda x: td.sort(x, 0)[0], MATRIX).is_proved
    assert not verdict(sorted_after(4), lambda x: td.sort(x, 0)[0], MATRIX).is_proved


def test_work_is_bounded() -> None:
    def grown(x: td.Tensor) -> td.Tensor:
        for _ in range(9):
            x = (x + td.roll(x, 1, 0)) ** 2 + td.tanh(x)
        return x

    graph = traced(grown, (spec(7),))
    assert nf.of(graph) is None
    assert nf.equal(graph, traced(td.tanh, (spec(7),))).outcome is Outcome.UNKNOWN


def test_integers_of_a_graph_are_polynomials_of_its_sizes() -> None:
    for value, text in ((N + M, {N, M}), (N * M, {N * M}), (2 * K + 3, {2 * K, 3})):
        index = SIZES.index(value)
        values = SIZES.values
        total = sum(math.prod([c, *(values[x.name] for x in m)]) for m, c in index.terms)
        assert total == value
        assert len(index.terms) == len(text)
    with pytest.raises(AmbiguousSizeError):
        nf.Sizes({"a": 1000, "b": 1001, "c": 1003, "d": 1004}).index(1000 + 1004)


def test_shapes_are_compared() -> None:
    found = verdict(lambda x: td.sum(x, 0), lambda x: td.sum(x, 1), MATRIX)
    assert found.outcome is Outcome.DIFFERENT
