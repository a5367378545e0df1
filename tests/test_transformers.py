"""Masks and biases of positions, lengths of recurrent layers, and the cache of keys and values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import treadle as td
from refusals import refused
from treadle import nn

rng = np.random.default_rng(3)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("ways", [False, True])
def test_lengths_are_as_packed_sequences(name: str, ways: bool) -> None:
    options = {"input_size": 3, "hidden_size": 4, "num_layers": 2, "bidirectional": ways}
    ours, theirs = getattr(nn, name)(**options), getattr(torch.nn, name)(**options).double()
    values = {n: t.detach().numpy() for n, t in theirs.named_parameters()}
    x, lengths = rng.standard_normal((7, 5, 3)), np.array([7, 3, 1, 5, 2])
    packed = pack_padded_sequence(torch.tensor(x), torch.tensor(lengths), enforce_sorted=False)
    output, last = theirs(packed)
    expected, _ = pad_packed_sequence(output)
    found, state = ours.apply(values, x, lengths=lengths)
    np.testing.assert_allclose(found.numpy(), expected.detach().numpy(), atol=1e-12)
    finals = zip(state, last, strict=True) if name == "LSTM" else [(state, last)]
    for a, b in finals:
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), atol=1e-12)


def test_gradients_stop_at_the_lengths() -> None:
    layer = nn.GRU(2, 3)
    values = layer.init(0)
    x, lengths = rng.standard_normal((5, 2, 2)), np.array([2, 5])
    gradient = td.grad(lambda x: (layer.apply(values, x, lengths=lengths)[0] ** 2).sum())(x).numpy()
    assert not gradient[2:, 0].any()
    assert (gradient[:, 1] != 0).all()


def test_masks() -> None:
    np.testing.assert_array_equal(nn.causal_mask(3).numpy(), np.triu(np.ones((3, 3)), 1) > 0)
    far = nn.sliding_window_mask(5, 2).numpy()
    i, j = np.indices((5, 5))
    np.testing.assert_array_equal(far, (i - j >= 2) | (j > i))
    both = nn.sliding_window_mask(5, 2, is_causal=False).numpy()
    np.testing.assert_array_equal(both, np.abs(i - j) >= 2)


@pytest.mark.parametrize("heads", [1, 4, 8, 12])
def test_alibi(heads: int) -> None:
    """Slopes as the authors' code gives them: also for heads that are no power of two."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

    bias = nn.alibi_bias(heads, 4, 6).numpy()
    i, j = np.indices((4, 6))
    expected = -np.abs(j - i) * np.array(slopes(heads))[:, None, None]
    np.testing.assert_allclose(bias, expected, rtol=1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets(bidirectional: bool) -> None:
    """Buckets by the formula of the paper's code, written out for single distances."""

    def bucket(relative: int, buckets: int = 32, most: int = 128) -> int:
        found = 0
        if bidirectional:
            buckets //= 2
            found = buckets if relative > 0 else 0
            relative = abs(relative)
        else:
            relative = max(-relative, 0)
        exact = buckets // 2
        if relative < exact:
            return found + relative
        large = exact + int(math.log(relative / exact) / math.log(most / exact) * (buckets - exact))
        return found + min(large, buckets - 1)

    layer = nn.T5RelativeBias(3, bidirectional=bidirectional)
    values = layer.init(0)
    bias = layer.apply(values, 40, 200).numpy()
    table = values["relative_attention_bias.weight"]
    expected = np.array([[table[bucket(s - t)] for s in range(200)] for t in range(40)])
    np.testing.assert_allclose(bias[0], np.moveaxis(expected, -1, 0), rtol=1e-6)


def test_a_cache_decodes_as_the_whole_sequence() -> None:
    b, heads, t, d = 2, 2, 6, 4
    q, k, v = (rng.standard_normal((b, heads, t, d)).astype(np.float32) for _ in range(3))
    whole = td.compile(lambda q, k, v: td.attention(q, k, v, causal=True), q, k, v)(q, k, v)
    cache = nn.KVCache(b, heads, 8, d)

    def decode(m: nn.KVCache, x: dict) -> td.Tensor:
        keys, values, mask = m(x["k"], x["v"], x["position"])
        return td.attention(x["q"], keys, values, mask)

    for parts in ([3, 1, 1, 1], [1] * 6, [6]):
        forwards = {}
        start, found, session = 0, [], None
        for n in parts:
            part = {"q": q, "k": k, "v": v}
            given = {name: a[:, :, start : start + n] for name, a in part.items()}
            given["position"] = np.array(start, np.int32)
            if n not in forwards:
                forwards[n] = td.compile_forward(cache, decode, given, training=True, share=session)
                session = session or forwards[n]
            found.append(forwards[n](given))
            start += n
        np.testing.assert_allclose(np.concatenate(found, 2), whole, atol=1e-5)


def test_grouped_keys_equal_repeated_ones() -> None:
    grouped = nn.MultiheadAttention(8, 4, num_kv_heads=2, batch_first=True)
    values = grouped.init(0)
    full = nn.MultiheadAttention(8, 4, kdim=8, batch_first=True, num_kv_heads=4)
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    spread = dict(values)
    for n in ("k_proj_weight", "v_proj_weight"):
        spread[n] = np.repeat(values[n].reshape(2, 1, 2, 8), 2, 1).reshape(8, 8)
    bias = values["in_proj_bias"]
    wide = [np.repeat(part.reshape(2, 1, 2), 2, 1).reshape(8) for part in (bias[8:12], bias[12:])]
    spread["in_proj_bias"] = np.concatenate([bias[:8], *wide])
    packed = {n: a for n, a in spread.items() if "proj_weight" not in n}
    packed["in_proj_weight"] = np.concatenate([spread[f"{p}_proj_weight"] for p in "qkv"])
    for need in (True, False):
        a = grouped.apply(values, x, x, x, need_weights=need)[0].numpy()
        c = full.apply(packed, x, x, x, need_weights=need)[0].numpy()
        np.testing.assert_allclose(a, c, atol=1e-6)


def test_a_layer_is_copied_for_a_stack() -> None:
    """As PyTorch does, but each copy draws first values of its own."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0)
    stack, made = nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(lambda: layer, 1)
    values = stack.init(0)
    first, second = (values[f"layers.{i}.linear1.weight"] for i in range(2))
    assert not np.array_equal(first, second)
    x = td.ones((3, 1, 4))
    alone = {n[len("layers.1.") :]: v for n, v in values.items() if n.startswith("layers.1.")}
    one = {f"layers.0.{n}": v for n, v in alone.items()}
    np.testing.assert_array_equal(made.apply(one, x).numpy(), layer.apply(alone, x).numpy())
    assert len(values) == 2 * len(alone)
    forward = td.compile_forward(stack, lambda m, x: m(x), td.Spec((3, 1, 4)), device="oracle")
    forward.load_params(values)
    expected = layer.apply(alone, layer.apply({n: values[f"layers.0.{n}"] for n in alone}, x))
    found = forward(np.ones((3, 1, 4), np.float32))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    refused(lambda: nn.TransformerEncoder(4, 2), td.ArgumentError, "TransformerEncoder", "function")
    refused(lambda: nn.MultiheadAttention(6, 4), td.ArgumentError, "MultiheadAttention", "4 heads")
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    values, x = attention.init(0), td.ones((2, 3, 4))
    mask = td.ones((3, 3)) > 0
    refused(
        lambda: attention.apply(values, x, x, x, key_padding_mask=mask), td.ShapeError, "attention"
    )
    gru = nn.GRU(4, 2)
    start = gru.init(0)
    refused(lambda: gru.apply(start, x, lengths=[1, 2]), td.ShapeError, "GRU", "lengths")
