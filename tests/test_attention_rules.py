"""Attention that is written out: recognised however it is written, and the same values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle as td
from backend import draw
from treadle import nn
from treadle.autodiff.backward import differentiate
from treadle.backends.registry import backend
from treadle.base import dtypes
from treadle.compile_report import CompileReport
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Node
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.kernel.target import CPU, GPU
from treadle.recognition.recognise import recognised as recognise
from treadle.rules.canonical import canonicalise
from treadle.rules.expansion import expand

BF16, BOOL = dtypes.bfloat16, dtypes.bool_
SHORT = replace(GPU.rewriting, least_fused_attention=1, least_key_blocks=1)
TARGET = replace(GPU, rewriting=SHORT)
B, H, T, S, D, E = 2, 3, 5, 7, 8, 16
Q, K, V = (TensorType(s, BF16) for s in ((B, H, T, D), (B, H, S, D), (B, H, S, E)))


def traced(function: Callable[..., Any], *types: TensorType) -> Graph:
    return canonicalise(td.trace(function, *types))


def found_in(graph: Graph, target: Any = TARGET) -> tuple[Graph, int]:
    """What is recognised, and how often."""
    entries: list[Any] = []
    found = verify(recognise(graph, target, Counter(), entries))
    assert {e.status.value for e in entries} <= {"proved"}
    return found, len(entries)


def recognised(graph: Graph, target: Any = TARGET) -> tuple[Graph, list[Node]]:
    found = found_in(graph, target)[0]
    return found, [n for n in found.nodes if n.op is c.ATTENTION]


def values(graph: Graph, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    report = CompileReport("oracle", "bfloat16")
    program = backend("oracle").load(graph, report, td.CompileOptions(), "graph")
    return [np.asarray(a, np.float64) for a in program.run(arrays)]


def assert_same(graph: Graph, found: Graph, arrays: dict[str, np.ndarray] | None = None) -> None:
    arrays = draw(graph, 5) if arrays is None else arrays
    for a, b in zip(values(graph, arrays), values(found, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03)


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def plain(q, k, v):
    return td.softmax(scores(q, k)) @ v


def scaled_before(q, k, v):
    return td.softmax((q * 0.5) @ k.transpose(-1, -2)) @ v


def rows_of_heads(q, k, v):
    weights = td.softmax(td.einsum("bthd,bshd->bhts", q, k) * 0.25)
    return td.einsum("bhts,bshe->bthe", weights, v)


def grouped(q, k, v):
    weights = td.softmax(td.einsum("bgrtd,bgsd->bgrts", q, k) * 0.25)
    return td.einsum("bgrts,bgse->btgre", weights, v)


def one_head(q, k, v):
    return td.softmax(q @ k.mT) @ v


def in_scenes(q, k, v):
    """With a bias of each scene."""
    weights = td.softmax(td.einsum("abhtd,abhsd->abhts", q, k) + v[:, :1, :, None, :, 0])
    return td.einsum("abhts,abhse->hbate", weights, v)


def by_values_first(q, k, v):
    return td.einsum("bhse,bhts->bhte", v, td.softmax(scores(q, k)))


def of(*shapes: tuple[int, ...]) -> list[TensorType]:
    return [TensorType(s, BF16) for s in shapes]


@pytest.mark.parametrize(
    ("function", "types", "expected"),  # the shapes of q and k
    [
        (plain, (Q, K, V), ((B, H, T, D), (B, H, S, D))),
        (scaled_before, (Q, K, V), ((B, H, T, D), (B, H, S, D))),
        (by_values_first, (Q, K, V), ((B, H, T, D), (B, H, S, D))),
        (rows_of_heads, of((B, T, H, D), (B, S, H, D), (B, S, H, E)), ((B, H, T, D), (B, H, S, D))),
        (grouped, of((B, H, 2, T, D), (B, H, S, D), (B, H, S, E)), ((B, 6, T, D), (B, H, S, D))),
        (
            in_scenes,
            of((2, B, H, T, D), (2, B, H, S, D), (2, B, H, S, E)),
            ((2 * B, H, T, D), (2 * B, H, S, D)),
        ),
        (one_head, of((B, T, D), (B, S, D), (B, S, E)), ((B, 1, T, D), (B, 1, S, D))),
    ],
)
def test_however_its_axes_lie(function, types, expected) -> None:
    graph = traced(function, *types)
    found, (node,) = recognised(graph)
    assert tuple(found.type_of(v).shape for v in node.operands[:2]) == expected
    assert_same(graph, found)


def with_mask(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, m: td.softmax(make(scores(q, k), m)) @ v


@pytest.mark.parametrize(
    ("function", "mask", "bias", "hides"),
    [
        (with_mask(lambda s, m: td.where(m, s, -math.inf)), (T, S), (1, 1, T, S), False),
        (with_mask(lambda s, m: td.where(m[:, None, None], -math.inf, s)), (B, S), (B, 1, 1, S), True),
        (with_mask(lambda s, m: td.where(m, s + 1.5, -math.inf)), (T, 1), (1, 1, T, 1), False),
    ],
)  # fmt: skip
def test_a_mask_is_a_bias_and_hidden_rows_are_nan(function, mask, bias, hides) -> None:
    graph = traced(function, Q, K, V, TensorType(mask, BOOL))
    found, (node,) = recognised(graph)
    assert found.type_of(node.operands[3]).shape == bias
    arrays = draw(graph, 5)
    (name,) = (n for n, a in arrays.items() if a.dtype == bool)
    arrays[name][:] = not hides
    assert not any(np.isnan(x).any() for x in values(found, arrays))
    arrays[name][0] = hides
    assert any(np.isnan(x).any() for x in values(found, arrays))
    assert_same(graph, found, arrays)


def positions() -> tuple[td.Tensor, td.Tensor]:
    return td.arange(T)[:, None], td.arange(S)[None, :]


CAUSAL = [
    lambda s: td.where(td.tril(td.ones((T, S))) > 0, s, -math.inf),
    lambda s: td.where(positions()[1] > positions()[0], -math.inf, s),
    lambda s: td.where(np.tri(T, S) == 0, -math.inf, s),
    lambda s: td.where(td.tril(td.ones((T, S))) > 0, s, -1e9),
    lambda s: s + (1 - td.tril(td.ones((T, S), BF16))) * -1e9,
    lambda s: s - td.where(positions()[1] > positions()[0], math.inf, 0.0).astype(BF16),
]


@pytest.mark.parametrize("number", range(len(CAUSAL)))
def test_a_causal_mask_is_no_bias(number: int) -> None:
    graph = traced(lambda q, k, v: td.softmax(CAUSAL[number](scores(q, k))) @ v, Q, K, V)
    found, (node,) = recognised(graph)
    assert isinstance(node.attributes, c.Attention)
    assert (node.attributes.causal, len(node.operands)) == (True, 3)
    assert not any(n.op.name == "where" for n in found.nodes), "every query sees a key"
    assert_same(graph, found)


def test_a_window_that_is_known_hides_no_row() -> None:
    def window(q, k, v):
        t, s = positions()
        return td.softmax(td.where(td.abs(t - s) <= 1, scores(q, k), -math.inf)) @ v

    graph = traced(window, Q, K, V)
    found, (node,) = recognised(graph)
    assert found.type_of(node.operands[3]).shape == (1, 1, T, S)
    assert sum(n.op.name == "where" for n in found.nodes) == 1, "the bias alone"
    assert_same(graph, found)


def other_axis(q, k, v):
    return td.softmax(scores(q, k), 2) @ v


def not_linear(q, k, v):
    return td.softmax(td.tanh(scores(q, k))) @ v


def weighted(q, k, v):
    return (td.softmax(scores(q, k)) * 2) @ v


@pytest.mark.parametrize("function", [other_axis, not_linear, weighted])
def test_what_is_not_attention_stays(function) -> None:
    assert not recognised(traced(function, Q, K, V))[1]


def test_it_stays_where_it_would_not_pay() -> None:
    wide = TensorType((B, H, T, 264), BF16)
    full = TensorType((B, H, T, D), dtypes.float32)
    for types in ((wide, wide, wide), (full, full, full)):
        assert not recognised(traced(plain, *types))[1]
    graph = traced(plain, Q, K, V)
    assert not recognised(graph, GPU)[1], "few keys"
    assert not recognised(graph, CPU)[1], "bfloat16 has no kernels there"
    gate = traced(one_head, *of((4096, 64), (64, 64), (64, 64)))
    assert not recognised(gate, GPU)[1], "one head: nothing to share"
    many = TensorType((8, 4, 64, 64), BF16)
    assert recognised(traced(plain, many, many, many), GPU)[1]


def test_a_layer_that_gives_weights_nobody_reads() -> None:
    layer = nn.MultiheadAttention(32, 2, batch_first=True)
    weights = {n: np.zeros(a.shape, np.float32) for n, a in layer.init(0).items()}

    def loss(x, hidden):
        half = {n: td.tensor(a).astype(BF16) for n, a in weights.items()}
        return layer.apply(half, x, x, x, key_padding_mask=hidden)[0]

    graph = traced(loss, TensorType((4, 6, 32), BF16), TensorType((4, 6), BOOL))
    assert found_in(graph)[1] == 1


def test_a_checkpoint_that_layers_share() -> None:
    def layer(x):
        return x + plain(x, x, x)

    def layers(x):
        return td.checkpoint(layer)(td.checkpoint(layer)(x)).astype(dtypes.float32).sum()

    graph = traced(layers, Q)
    found, count = found_in(graph)
    assert count == 1, "they share one body"
    gradients = [differentiate(g, ["x"]).graph for g in (graph, found)]
    arrays = draw(gradients[0], 5)
    for a, b in zip(*(values(g, arrays) for g in gradients), strict=True):
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(a), "rounded elsewhere"
    assert any(n.op is c.ATTENTION_GRAD for n in expand(gradients[1], TARGET, kept).nodes)
    unlike = traced(lambda x: td.checkpoint(td.tanh)(x), Q)
    assert recognised(unlike)[0] == unlike


def kept(node: Node, types: object, target: object) -> bool:
    return node.op in (c.ATTENTION, c.ATTENTION_GRAD)
