"""What is written out by hand becomes the composite that it is, and nothing else does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treadle as td
from backend import draw
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.rewrites import Recognised, Status
from treadle.compile_report import CompileReport
from treadle.domains import field
from treadle.domains.domain import evaluate
from treadle.domains.float64 import Float64
from treadle.ir import composites as c
from treadle.ir.composites import definition_graph
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.kernel.target import CPU
from treadle.pipeline import recognise
from treadle.recognition import search
from treadle.recognition.judge import snapped
from treadle.recognition.meanings import meaning_graph
from treadle.recognition.recognise import recognised
from treadle.rules.canonical import canonicalise

X = TensorType((4, 16))
Y = TensorType((4,), dtypes.int32)
M = TensorType((4, 16), dtypes.bool_)
W = TensorType((16,))
IMAGES, CHANNELS = TensorType((2, 6, 5, 4)), TensorType((6,))
Q = TensorType((2, 2, 16, 4))
KEYS = TensorType((2, 16), dtypes.bool_)


def found_in(function: Callable[..., Any], *types: TensorType) -> tuple[list[Recognised], Graph]:
    """What is recognised, and the graph after it, which has the same values."""
    graph = canonicalise(td.trace(function, *types))
    found: list[Recognised] = []
    after = verify(recognised(graph, CPU, Counter(), found))
    arrays = {n: a.astype(np.float64) if a.dtype.kind == "f" else a % 4 if a.dtype.kind == "i" else a
              for n, a in draw(graph, 3).items()}  # fmt: skip
    for a, b in zip(*(evaluate(g, arrays, Float64()) for g in (graph, after)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    return found, after


def last(x, axis=-1):
    return td.sum(x, axis, keepdims=True)


def soft(x):
    e = td.exp(x - td.max(x, -1, keepdims=True))
    return e / last(e)


def moments(x, axes):
    mean = td.mean(x, axes, keepdims=True)
    return mean, td.mean((x - mean) * (x - mean), axes, keepdims=True)


def normed(x, axes=-1, eps=1e-5):
    mean, var = moments(x, axes)
    return (x - mean) / td.sqrt(var + eps)


def by_squares(x):
    mean = td.mean(x, -1, keepdims=True)
    return (x - mean) * td.rsqrt(td.mean(x * x, -1, keepdims=True) - mean * mean + 1e-5)


def by_groups(x):
    return normed(x.reshape(2, 3, -1)).reshape(*x.shape)


def rms(x, eps=1e-6):
    return x / td.sqrt(td.mean(td.pow(x, 2), -1, keepdims=True) + eps)


def channels(x):
    return x.reshape(1, -1, 1, 1)


def chosen(x, y):
    return td.take_along_axis(x, y.unsqueeze(-1), -1).squeeze(-1)


def smooth(z, y):
    logs = td.log_softmax(z, -1)
    return -0.9 * chosen(logs, y) - 0.1 * logs.mean(-1)


def smooth_targets(z, y):
    return -((td.one_hot(y, 16) * 0.9 + 0.1 / 16) * td.log_softmax(z, -1)).sum(-1)


def ignoring(z, y):
    keeps = y != 3
    rows = -chosen(td.log_softmax(z, -1), td.where(keeps, y, 0)) * keeps
    return rows.sum() / keeps.sum()


SPELLINGS: dict[str, tuple[str, Callable[..., Any], tuple[TensorType, ...]]] = {
    "softmax": ("softmax", lambda x: td.exp(x) / last(td.exp(x)), (X,)),
    "shifted": ("softmax", soft, (X,)),
    "detached": (
        "softmax",
        lambda x: soft(x - td.stop_gradient(td.max(x, -1, keepdims=True))),
        (X,),
    ),
    "first axis": ("softmax", lambda x: td.exp(x) / td.sum(td.exp(x), 0), (X,)),
    "masked": ("softmax", lambda x, m: td.where(m, td.exp(x), 0.0) / last(td.where(m, td.exp(x), 0.0)), (X, M)),
    "log of softmax": ("log_softmax", lambda x: td.log(td.softmax(x, -1)), (X,)),
    "less logsumexp": ("log_softmax", lambda x: x - td.logsumexp(x, -1, keepdims=True), (X,)),
    "logsumexp": ("logsumexp", lambda x: td.log(td.sum(td.exp(x), -1)), (X,)),
    "sigmoid": ("sigmoid", lambda x: td.exp(x) / (1 + td.exp(x)), (X,)),
    "silu": ("silu", lambda x: x / (1 + td.exp(-x)), (X,)),
    "swiglu": ("silu", lambda x, y: x / (1 + td.exp(-x)) * y, (X, X)),
    "gelu": ("gelu", lambda x: 0.5 * x * (1 + td.erf(x / math.sqrt(2))), (X,)),
    "gelu tanh": ("gelu", lambda x: x / 2 * (1 + td.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))), (X,)),
    "layer norm": ("layer_norm", lambda x, w, b: normed(x) * w + b, (X, W, W)),
    "squares": ("layer_norm", lambda x, w, b: b + w * by_squares(x), (X, W, W)),
    "rms norm": ("rms_norm", lambda x, w: rms(x) * w, (X, W)),
    "rms norm, one more": ("rms_norm", lambda x, w: rms(x) * (1 + w), (X, W)),
    "batch norm": ("batch_norm", lambda x, w, b: normed(x, (0, 2, 3)) * channels(w) + channels(b), (IMAGES, CHANNELS, CHANNELS)),
    "group norm": ("group_norm", lambda x, w, b: by_groups(x) * channels(w) + channels(b), (IMAGES, CHANNELS, CHANNELS)),
    "cross-entropy": ("cross_entropy", lambda z, y: -chosen(td.log(td.softmax(z, -1)), y), (X, Y)),
    "of probabilities": ("cross_entropy", lambda z, y: -td.log(chosen(soft(z), y)).mean(), (X, Y)),
    "one-hot": ("cross_entropy", lambda z, y: -(td.log_softmax(z, -1) * td.one_hot(y, 16)).sum(-1), (X, Y)),
    "logsumexp less chosen": ("cross_entropy", lambda z, y: (td.logsumexp(z, -1) - chosen(z, y)).mean(), (X, Y)),
    "by rows and columns": ("cross_entropy", lambda z, y: -td.log_softmax(z, -1)[td.arange(4), y].mean(), (X, Y)),
    "smoothed": ("cross_entropy", smooth, (X, Y)),
    "smoothed targets": ("cross_entropy", smooth_targets, (X, Y)),
    "ignored": ("cross_entropy", ignoring, (X, Y)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_its_composite(name: str) -> None:
    wanted, function, types = SPELLINGS[name]
    found, after = found_in(function, *types)
    assert wanted in [f.name for f in found]
    assert all(f.status is Status.PROVED for f in found)
    node = next(n for n in after.nodes if n.op.name == wanted)
    others = {"layer_norm": 3, "batch_norm": 3, "group_norm": 3, "rms_norm": 2}
    assert len(node.operands) == others.get(wanted, len(node.operands)), "with its weights"
    assert "test_recognition.py" in str(found[0].origin)


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def seen(n=16, m=16):
    return td.iota((n, m), 1) <= td.iota((n, m), 0)


def mixed(weigh: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, *more: weigh(scores(q, k), *more) @ v


# Spellings that differ in meaning: by the composite that each must not become.
NEAR: dict[str, tuple[str, Callable[..., Any], tuple[TensorType, ...]]] = {
    "softmax of two axes": ("softmax", lambda x: td.exp(x) / last(td.sum(td.exp(x), 0, keepdims=True)), (X,)),
    "softmax summed along the other axis": ("softmax", lambda x: td.exp(x) / td.sum(td.exp(x * 2), -1, keepdims=True), (X,)),
    "softmax of unlike shifts": ("softmax", lambda x: td.exp(x - td.max(x)) / last(td.exp(x)), (X,)),
    "softmax with a floor": ("softmax", lambda x: td.exp(x) / (last(td.exp(x)) + 1e-6), (X,)),
    "one more than softmax": ("softmax", lambda x: td.exp(x) / (1 + last(td.exp(x))), (X,)),
    "softmax by powers of two": ("softmax", lambda x: td.exp(x * 0.6931471) / last(td.exp(x)), (X,)),
    "softmax without a part of the gradient": ("softmax", lambda x: td.exp(x) / td.stop_gradient(last(td.exp(x))), (X,)),
    "mean of exponentials": ("logsumexp", lambda x: td.log(td.mean(td.exp(x), -1)), (X,)),
    "log1p of exponentials": ("logsumexp", lambda x: td.log(1 + td.sum(td.exp(x), -1)), (X,)),
    "log softmax, twice the sum": ("log_softmax", lambda x: x - 2 * td.log(last(td.exp(x))), (X,)),
    "sigmoid of −x": ("sigmoid", lambda x: 1 / (2 + td.exp(-x)), (X,)),
    "silu with a slope": ("silu", lambda x: x / (1 + td.exp(-1.702 * x)), (X,)),
    "gelu with another constant": ("gelu", lambda x: 0.5 * x * (1 + td.erf(x / 1.4142)), (X,)),
    "gelu without the half": ("gelu", lambda x: x * (1 + td.erf(x / math.sqrt(2))), (X,)),
    "gelu tanh with 0.0447": ("gelu", lambda x: 0.5 * x * (1 + td.tanh(0.7978845608 * (x + 0.0447 * x * x * x))), (X,)),
    "gelu tanh of squares": ("gelu", lambda x: 0.5 * x * (1 + td.tanh(0.7978845608 * (x + 0.044715 * x * x))), (X,)),
    "norm by n − 1": ("layer_norm", lambda x: (x - td.mean(x, -1, keepdims=True)) / td.sqrt(td.var(x, -1, keepdims=True) + 1e-5), (X,)),
    "eps outside the root": ("layer_norm", lambda x: (x - td.mean(x, -1, keepdims=True)) / (td.sqrt(moments(x, -1)[1]) + 1e-5), (X,)),
    "norm of the other axis": ("layer_norm", lambda x: normed(x, 0), (X,)),
    "norm that is not centred": ("layer_norm", lambda x: x / td.sqrt(moments(x, -1)[1] + 1e-5), (X,)),
    "norm whose mean has no gradient": ("layer_norm", lambda x: (x - td.stop_gradient(td.mean(x, -1, keepdims=True))) / td.sqrt(moments(x, -1)[1] + 1e-5), (X,)),
    "rms by a sum": ("rms_norm", lambda x: x / td.sqrt(td.sum(x * x, -1, keepdims=True) + 1e-6), (X,)),
    "rms with eps after": ("rms_norm", lambda x: x / (td.sqrt(td.mean(x * x, -1, keepdims=True)) + 1e-6), (X,)),
    "rms of absolute values": ("rms_norm", lambda x: x / td.sqrt(td.mean(td.abs(x), -1, keepdims=True) + 1e-6), (X,)),
    "batch norm of one image": ("batch_norm", lambda x: normed(x, (1, 2, 3)), (IMAGES,)),
    "cross-entropy of another row": ("cross_entropy", lambda z, y: td.logsumexp(z, -1) - td.flip(chosen(z, y), 0), (X, Y)),
    "smoothing that does not add up": ("cross_entropy", lambda z, y: -((td.one_hot(y, 16) * 0.9 + 0.2 / 16) * td.log_softmax(z, -1)).sum(-1), (X, Y)),
    "cross-entropy of the next class": ("cross_entropy", lambda z, y: td.logsumexp(z, -1) - chosen(z, y) * 2, (X, Y)),
    "cross-entropy of half the classes": ("cross_entropy", lambda z, y: td.logsumexp(z[:, :8], -1) - chosen(z, y), (X, Y)),
    "attention over queries": ("attention", lambda q, k, v: td.softmax(scores(q, k), 2) @ v, (Q, Q, Q)),
    "attention of tanh": ("attention", mixed(lambda s: td.softmax(td.tanh(s), -1)), (Q, Q, Q)),
    "attention whose weights are used twice": ("attention", mixed(lambda s: td.softmax(s, -1) + td.softmax(s, -1) ** 2), (Q, Q, Q)),
    "attention masked after the softmax": ("attention", mixed(lambda s: td.where(seen(), td.softmax(s, -1), 0.0)), (Q, Q, Q)),
    "attention masked by −5": ("attention", mixed(lambda s: td.softmax(td.where(seen(), s, -5.0), -1)), (Q, Q, Q)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_are_never_merged(name: str) -> None:
    wrong, function, types = NEAR[name]
    found, _ = found_in(function, *types)
    assert wrong not in [f.name for f in found]


# Masks that are not the causal one: attention, but with a bias.
MASKS: dict[str, Callable[..., Any]] = {
    "inverted": lambda s: td.where(seen(), -math.inf, s),
    "without itself": lambda s: td.where(td.iota((16, 16), 1) < td.iota((16, 16), 0), s, -math.inf),
    "one too many": lambda s: td.where(td.iota((16, 16), 1) <= td.iota((16, 16), 0) + 1, s, -math.inf),
    "transposed": lambda s: td.where(seen().transpose(0, 1), s, -math.inf),
    "window": lambda s: td.where(td.abs(td.iota((16, 16), 1) - td.iota((16, 16), 0)) < 3, s, -math.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_are_not_causal(name: str) -> None:
    graph = td.trace(mixed(lambda s: td.softmax(MASKS[name](s), -1)), Q, Q, Q)
    after = recognise(graph)
    (node,) = (n for n in after.nodes if n.op is c.ATTENTION)
    assert isinstance(node.attributes, c.Attention)
    assert (node.attributes.causal, len(node.operands)) == (False, 4)


def first_hidden(s, m):
    """Causal, and then keys that are not there: early queries may see nothing."""
    return td.where(m[:, None, None], td.where(seen(), s, -1e9), -1e9)


BLIND: dict[str, Callable[..., Any]] = {
    "given": lambda s, m: td.where(m[:, None, None], s, -1e9),
    "causal and given": first_hidden,
    "known": lambda s, m: td.where(td.iota((16, 16), 1) < td.iota((16, 16), 0), s, -1e4),
}


@pytest.mark.parametrize("name", BLIND)
def test_finite_masks_that_may_hide_a_row_stay(name: str) -> None:
    """Such a row is the mean of all values: with −∞ for the number it would be another."""
    function = mixed(lambda s, m: td.softmax(BLIND[name](s, m), -1))
    _, after = found_in(function, Q, Q, Q, KEYS)
    assert not any(n.op is c.ATTENTION for n in after.nodes)


def rounded(x):
    return td.cast(td.cast(x, td.bfloat16), td.float32)


ROUNDED: dict[str, Callable[..., Any]] = {
    "scores": mixed(lambda s: td.softmax(rounded(s), -1)),
    "weights": mixed(lambda s: rounded(td.softmax(s, -1))),
    "softmax": lambda q, k, v: soft(rounded(q)),
    "rms": lambda q, k, v: rounded(q) * td.rsqrt((q * q).mean(-1, keepdims=True) + 1e-5),
    "sigmoid": lambda q, k, v: 1 / (1 + td.exp(-rounded(q))),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_that_is_written_stays(name: str) -> None:
    """A cast to a narrower float and back is nothing over the reals, and meant all the same."""
    q, k, v = (np.random.default_rng(i).normal(size=Q.shape).astype(np.float32) for i in range(3))
    specs = [td.Spec(Q.shape)] * 3
    strict = td.CompileOptions(numerics="strict")
    usual, as_written = (
        np.asarray(td.compile(ROUNDED[name], *specs, device="cpu", options=o)(q, k, v))
        for o in (None, strict)
    )
    np.testing.assert_allclose(usual, as_written, rtol=1e-5, atol=1e-5)


def test_labels_by_comparison_may_be_out_of_range() -> None:
    """They count for nothing there; the composite refuses them."""
    x, t = np.ones((4, 32), np.float32), np.array([0, -100, 3, 5], np.int32)

    def loss(x, t):
        chosen = td.where(td.unsqueeze(t, -1) == td.arange(32), td.log_softmax(x, -1), 0.0)
        return -chosen.sum(-1)

    found = td.compile(loss, x, t, device="cpu")(x, t)
    np.testing.assert_allclose(found, math.log(32) * (t >= 0), rtol=1e-5)


def test_what_cannot_be_recognised_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many candidates that come to nothing are not all looked at."""
    seen_by: list[Graph] = []
    real = search.judge
    monkeypatch.setattr(search, "judge", lambda a, b: (seen_by.append(a), real(a, b))[1])

    def repeated_norm(x):
        for _ in range(3):
            x = x + 0.1 * td.tanh(x)
            x = x / td.sqrt((x * x).mean() + 1e-6)
        return x

    recognise(td.trace(repeated_norm, td.Spec((8, 8))))
    assert 0 < len(seen_by) < 60


def by_rows(q, k, v):
    q, k, v = (x.reshape(4, 16, 4) for x in (q, k, v))
    s = td.where(seen(), (q @ k.mT).reshape(2, 2, 16, 16), -1e9) * 0.5
    return (td.softmax(s, -1).reshape(4, 16, 16) @ v).reshape(2, 2, 16, 4)


def repeated(q, k, v):
    k, v = (td.repeat_interleave(x, 2, 1) for x in (k[:, :1], v[:, :1]))
    return mixed(lambda s: td.softmax(s, -1))(q, k, v)


ATTENTIONS: dict[str, tuple[Callable[..., Any], tuple[TensorType, ...], bool, int, str]] = {
    "plain": (mixed(lambda s: td.softmax(s, -1)), (Q, Q, Q), False, 3, "exact"),
    "causal": (mixed(lambda s: soft(td.where(seen(), s, -math.inf))), (Q, Q, Q), True, 3, "exact"),
    "added": (mixed(lambda s: td.softmax(s + (1 - td.tril(td.ones((16, 16)))) * -1e9, -1)), (Q, Q, Q), True, 3, "saturating mask"),
    "by rows": (by_rows, (Q, Q, Q), True, 3, "saturating mask"),
    "keys": (mixed(lambda s, m: td.softmax(td.where(m[:, None, None], s, -math.inf), -1)), (Q, Q, Q, KEYS), False, 4, "exact"),
    "repeated": (repeated, (Q, Q, Q), False, 3, "exact"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_in_float32(name: str) -> None:
    function, types, causal, operands, kind = ATTENTIONS[name]
    found, after = found_in(function, *types)
    (node,) = (n for n in after.nodes if n.op is c.ATTENTION)
    assert isinstance(node.attributes, c.Attention)
    assert (node.attributes.causal, len(node.operands)) == (causal, operands)
    assert (found[-1].exactness.value, found[-1].status) == (kind, Status.PROVED)
    heads = after.type_of(node.operands[1]).shape[1]
    assert heads == (1 if name == "repeated" else 2), "keys that are repeated are read once"


@pytest.mark.parametrize(
    "scores_of",
    [
        lambda q, k: (q * 0.5) @ k.mT,
        lambda q, k: q @ (k / 2).mT,
        lambda q, k: (q / 4).reshape(2, 2, 16, 4) @ (k.mT * 2),
        lambda q, k: td.einsum("bhqd,bhkd->bhqk", q.permute(1, 0, 2, 3) / 2, k.permute(1, 0, 2, 3)).permute(1, 0, 2, 3),
    ],
)  # fmt: skip
def test_scaled_queries_are_scaled_scores(scores_of: Callable[..., Any]) -> None:
    """Nobody stores the multiple."""
    _, after = found_in(lambda q, k, v: td.softmax(scores_of(q, k), -1) @ v, Q, Q, Q)
    (node,) = (n for n in after.nodes if n.op is c.ATTENTION)
    assert isinstance(node.attributes, c.Attention)
    assert node.attributes.scale == 0.5
    assert not {n.op.name for n in after.nodes} & {"mul", "div"}


def shifted(x, w, pad=1, stride=1, dilation=1):
    padded = td.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    h, n = ((m + 2 * pad - 2 * dilation - 1) // stride + 1 for m in x.shape[2:])
    total = None
    for i in range(3):
        for j in range(3):
            rows, columns = (
                slice(k * dilation, k * dilation + (m - 1) * stride + 1, stride)
                for k, m in ((i, h), (j, n))
            )
            term = td.einsum("nchw,oc->nohw", padded[:, :, rows, columns], w[:, :, i, j])
            total = term if total is None else total + term
    return total


def unfolded(x, w):
    n, c_, h, m = x.shape
    padded = td.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    parts = [padded[:, :, i : i + h, j : j + m] for i in range(3) for j in range(3)]
    columns = td.stack(parts, 2).reshape(n, c_ * 9, h * m)
    return (w.reshape(-1, c_ * 9) @ columns).reshape(n, -1, h, m)


def causal_rows(x, w):
    padded = td.pad(x, ((0, 0), (0, 0), (2, 0)))
    parts = [padded[:, :, k : k + x.shape[2]] * w[:, k][None, :, None] for k in range(3)]
    return parts[0] + parts[1] + parts[2]


KERNEL = TensorType((5, 6, 3, 3))
CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[TensorType, ...], c.Conv]] = {
    "unfolded": (unfolded, (IMAGES, KERNEL), c.Conv((1, 1), ((1, 1), (1, 1)), (1, 1))),
    "shifted": (shifted, (IMAGES, KERNEL), c.Conv((1, 1), ((1, 1), (1, 1)), (1, 1))),
    "strided": (lambda x, w: shifted(x, w, 1, 2), (IMAGES, KERNEL), c.Conv((2, 2), ((1, 1), (1, 1)), (1, 1))),
    "dilated": (lambda x, w: shifted(x, w, 2, 1, 2), (IMAGES, KERNEL), c.Conv((1, 1), ((2, 2), (2, 2)), (2, 2))),
    "in narrow floats": (lambda x, w: shifted(x.astype(td.bfloat16), w.astype(td.bfloat16)), (IMAGES, KERNEL), c.Conv((1, 1), ((1, 1), (1, 1)), (1, 1))),
    "of each channel": (causal_rows, (TensorType((2, 6, 9)), TensorType((6, 3))), c.Conv((1,), ((2, 0),), (1,), 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    function, types, wanted = CONVOLUTIONS[name]
    found, after = found_in(function, *types)
    (node,) = (n for n in after.nodes if n.op is c.CONV)
    assert (node.attributes, found[-1].status) == (wanted, Status.PROVED)


def test_a_flag_of_another_shape_is_no_mask() -> None:
    def function(x, m):
        e = td.exp(td.where(m[0, 0], 1.0, 2.0) * x)
        return e / last(e)

    assert "exp" not in [n.op.name for n in found_in(function, X, M)[1].nodes]


def test_sums_that_are_no_convolution() -> None:
    def left_out(x, w):
        padded = td.pad(x, ((0, 0), (0, 0), (2, 0)))
        return padded[:, :, :9] * w[:, 0][None, :, None] + padded[:, :, 2:] * w[:, 1][None, :, None]

    found, _ = found_in(left_out, TensorType((2, 6, 9)), TensorType((6, 3)))
    assert not found


# Recurrences


def cell(x, h, c_, w, u):
    i, f, g, o = td.chunk(x @ w + h @ u, 4, -1)
    c_ = td.sigmoid(f) * c_ + td.sigmoid(i) * td.tanh(g)
    return td.sigmoid(o) * td.tanh(c_), c_


def unrolled(x, w, u, times=None, broken=-1):
    h = c_ = td.zeros((3, 4))
    out = {}
    for t in times or range(x.shape[0]):
        h, c_ = cell(x[t], h * 0.5 if t == broken else h, c_, w, u)
        out[t] = h
    return td.stack([out[t] for t in range(x.shape[0])])


SEQUENCE, GATES = TensorType((8, 3, 4)), TensorType((4, 16))
BACK = range(7, -1, -1)


@pytest.mark.parametrize(
    ("function", "scans", "nodes"),
    [
        (unrolled, 1, 5),
        (lambda x, w, u: unrolled(x, w, u, BACK), 1, 5),
        (lambda x, w, u: unrolled(unrolled(x, w, u), w, u), 2, 6),
        (lambda x, w, u: td.concat([unrolled(x, w, u), unrolled(x, w, u, BACK)], -1), 2, 7),
        (lambda x, w, u: unrolled(x, w, u)[-1], 1, 7),
    ],
)
def test_unrolled_recurrences_are_scans(function, scans: int, nodes: int) -> None:
    found, after = found_in(function, SEQUENCE, GATES, GATES)
    assert [f.name for f in found] == ["scan"] * scans
    assert len(after.nodes) <= nodes


@pytest.mark.parametrize("broken", [2, 4, 6])
def test_steps_that_are_not_equal_stay(broken: int) -> None:
    found, _ = found_in(lambda x, w, u: unrolled(x, w, u, None, broken), SEQUENCE, GATES, GATES)
    assert not found


def test_bodies_of_scans_and_calls() -> None:
    def step(carry, x):
        return carry + soft(x), td.checkpoint(soft)(x)

    found, after = found_in(lambda x: td.scan(step, td.zeros((16,)), x), X)
    assert [f.name for f in found] == ["softmax"] * 2
    assert not any(n.op.name == "exp" for n in after.nodes)


def test_what_is_computed_wider_stays_so() -> None:
    graph = td.trace(lambda x: soft(x.astype(td.float64)).astype(td.float32), X)
    after = recognise(graph)
    (node,) = (n for n in after.nodes if n.op is c.SOFTMAX)
    assert node.types[0].dtype is dtypes.float64


# The option, the report, and whole steps


def test_strict_numerics_recognises_nothing() -> None:
    graph = td.trace(lambda x: td.log(td.softmax(x, -1)), X)
    report = CompileReport("cpu", "float32")
    assert recognise(graph, report=report, numerics="strict") == canonicalise(graph)
    assert not report.recognised
    recognise(graph, report=report)
    assert "recognised: log_softmax at test_recognition.py" in str(report)
    assert report.rules["log_softmax"] == 1
    with pytest.raises(td.ArgumentError, match="numerics"):
        td.CompileOptions(numerics="loose")


def losses_of(loss: Callable[..., Any], options: td.CompileOptions) -> list[float]:
    step = td.compile_step(
        nn.Linear(4, 3), loss, optim.sgd(0.1),
        {"x": td.Spec((5, 4)), "y": td.Spec((5,), td.int32)},
        device="oracle", seed=0, options=options,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(5, 4)).astype(np.float32) * 3000, "y": np.arange(5) % 3}
    return [float(step(batch).loss) for _ in range(3)]


def test_the_log_of_a_softmax_trains_where_the_composite_does() -> None:
    def by_hand(model, batch):
        return -td.mean(chosen(td.log(td.softmax(model(batch["x"]), -1)), batch["y"]))

    def composite(model, batch):
        return td.losses.cross_entropy(model(batch["x"]), batch["y"])

    options, strict = td.CompileOptions(), td.CompileOptions(numerics="strict")
    wanted = losses_of(composite, options)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(losses_of(by_hand, options), wanted, rtol=1e-6)
    assert not np.isfinite(losses_of(by_hand, strict)).all()


def test_what_sums_one_element_is_left_as_it_is() -> None:
    """x − logsumexp(x) of one element is 0, and so is 1 − its softmax: neither is the other."""

    def shifted(x):
        return x - td.logsumexp(x, 0, keepdims=True)

    for function in (shifted, td.grad(lambda x: shifted(x).sum())):
        found, _ = found_in(function, TensorType((1,)))
        assert found == []
        program = td.compile(function, td.Spec((1,)), device="cpu")
        assert program(np.array([3.0], np.float32)).tolist() == [0.0]
    assert [f.name for f in found_in(shifted, TensorType((2,)))[0]] == ["log_softmax"]


def as_array(types: tuple[TensorType, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        str(i): rng.normal(size=t.shape) if t.is_float else rng.integers(0, 4, t.shape)
        for i, t in enumerate(types)
    }


@pytest.mark.parametrize(
    ("op", "attributes", "types"),
    [
        (c.SOFTMAX, c.Axis(0), (X,)),
        (c.LOG_SOFTMAX, c.Axis(1), (X,)),
        (c.LOGSUMEXP, c.Axes((0, 1)), (X,)),
        (c.CROSS_ENTROPY, c.CrossEntropy(0.1), (X, Y)),
        (c.ATTENTION, c.Attention(0.3, True), (Q, Q, Q)),
        (c.ATTENTION, c.Attention(0.3), (Q, Q, Q, TensorType((1, 2, 1, 16)))),
    ],
)
def test_meanings_are_definitions(op, attributes, types) -> None:
    both = (make(op, attributes, types) for make in (meaning_graph, definition_graph))
    for a, b in zip(*(evaluate(g, as_array(types), Float64()) for g in both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_logarithms_of_a_field_are_few() -> None:
    """One class, whose loss is 0 whatever is given: it took eight seconds to find that out."""
    types = td.Spec((9, 1, 65, 4)), td.Spec((9, 65, 4), td.int32), td.Spec((1,))
    graph = td.trace(lambda x, y, w: losses.cross_entropy(x, y, w), *types)
    looked, usual = list[int](), field.logarithm

    def counted(lane: Any, values: np.ndarray) -> Any:
        looked.append(values.size)
        return usual(lane, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "logarithm", counted)
        recognise(graph)
    assert sum(looked) < 20_000


@pytest.mark.parametrize("size", [1e-300, 3e200])
def test_constants_whose_products_no_float_holds(size: float) -> None:
    """They were an OverflowError, or stood in for any other small constant."""
    wide = TensorType((3,), dtypes.float64)
    graph, other = (td.trace(lambda x, n=n: td.exp(x * n), wide) for n in (1e-20, size))
    assert snapped(graph, other) is None
