"""Masks and biases of positions, lengths of recurrent layers, and the cache of keys and values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("wrong", [9, -1])
def test_lengths_are_at_most_the_steps(name: str, wrong: int) -> None:
    """Known ones when the layer is called, those of a batch when the program runs."""
    layer = getattr(nn, name)(3, 2, batch_first=True)
    x, lengths = rng.standard_normal((2, 4, 3)).astype(np.float32), np.array([2, wrong])
    values = layer.init(0)
    refused(
        lambda: layer.apply(values, x, lengths=lengths), td.IndexRangeError, name, f"[1] is {wrong}"
    )

    def loss(model, batch):
        return (model(batch["x"], lengths=batch["lengths"])[0] ** 2).mean()

    good = {"x": x, "lengths": np.array([4, 0], np.int32)}
    step = td.compile_step(layer, loss, td.optim.sgd(0.1), good, device="cpu")
    step(good)
    before = step.params
    with pytest.raises(td.IndexRangeError, match=rf"lengths\[1\] is {wrong}.* from 0 to 4"):
        step({"x": x, "lengths": lengths.astype(np.int32)})
    assert all(np.array_equal(before[n], a) for n, a in step.params.items())


def test_gradients_stop_at_the_lengths() -> None:
    layer = nn.GRU(2, 3)
    values = layer.init(0)
    x, lengths = rng.standard_normal((5, 2, 2)), np.array([2, 5])
    gradient = td.grad(lambda x: (layer.apply(values, x, lengths=lengths)[0] ** 2).sum())(x).numpy()
    assert not gradient[2:, 0].any()
    assert (gradient[:, 1] != 0).all()


def test_masks() -> None:
    """They are added to scores: 0 or −∞, as PyTorch's generator of masks gives them."""
    wanted = torch.nn.Transformer.generate_square_subsequent_mask(3).numpy()
    np.testing.assert_array_equal(nn.causal_mask(3).numpy(), wanted)
    far = nn.sliding_window_mask(5, 2).numpy()
    i, j = np.indices((5, 5))
    np.testing.assert_array_equal(far, np.where((i - j >= 2) | (j > i), -np.inf, 0))
    both = nn.sliding_window_mask(5, 2, is_causal=False).numpy()
    np.testing.assert_array_equal(both, np.where(np.abs(i - j) >= 2, -np.inf, 0))


def heads() -> list[np.ndarray]:
    return [rng.standard_normal((2, 2, 4, 8)) for _ in range(3)]


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_a_bool_bias_is_true_where_a_key_takes_part(device: str) -> None:
    """As in scaled_dot_product_attention; a query without keys gives zeros, and no gradient."""
    q, k, v = (x.astype(np.float32) for x in heads())
    mask = rng.random((2, 1, 4, 4)) < 0.6
    mask[0, 0, 2] = False

    def total(q: td.Tensor, k: td.Tensor, v: td.Tensor, mask: td.Tensor) -> td.Tensor:
        return (td.attention(q, k, v, mask) ** 2).sum()

    compiled = td.compile(td.grad(total, (0, 1, 2)), q, k, v, mask, device=device)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, attn_mask=torch.tensor(mask))
    (wanted**2).sum().backward()
    found = td.attention(q, k, v, bias=mask)
    np.testing.assert_allclose(found.numpy(), wanted.detach().numpy(), atol=1e-6)
    for ours, leaf in zip(compiled(q, k, v, mask), leaves, strict=True):
        np.testing.assert_allclose(ours, leaf.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_masks_mean_the_same_to_functions_and_layers(kind: str) -> None:
    """What is given to td.attention may be given to every layer."""
    mask = nn.causal_mask(4) if kind == "causal" else nn.sliding_window_mask(4, 2)
    q, k, v = heads()
    seen = np.isfinite(mask.numpy())
    tensors = [torch.tensor(x) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*tensors, attn_mask=torch.tensor(seen)).numpy()
    for given in (mask, seen):
        np.testing.assert_allclose(td.attention(q, k, v, given).numpy(), wanted, atol=1e-12)

    x = rng.standard_normal((2, 4, 6))
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    own = nn.MultiHeadAttention(6, 2, batch_first=True)
    values = layer.init(0)
    twin = torch.nn.MultiheadAttention(6, 2, batch_first=True).double()
    twin.load_state_dict({n: torch.tensor(a).double() for n, a in values.items()})
    hidden = torch.tensor(~seen)
    with torch.no_grad():
        wanted = twin(*[torch.tensor(x)] * 3, attn_mask=hidden, need_weights=False)[0].numpy()
    for given in (mask, ~seen):
        found = layer.apply(values, x, x, x, attn_mask=given)[0]
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)
    np.testing.assert_allclose(own.apply(values, x, bias=mask).numpy(), wanted, atol=1e-6)


def test_masks_that_could_be_read_both_ways_are_refused() -> None:
    """With remedies that are executed here, and mean what scaled_dot_product_attention means."""
    q, k, v = heads()
    mask = np.tri(4) > 0  # True where a key takes part
    wanted = td.attention(q, k, v, mask).numpy()
    refused(
        lambda: td.attention(q, k, v, mask.astype(int)), td.DTypeError, "attention", "mask != 0"
    )
    np.testing.assert_array_equal(td.attention(q, k, v, mask.astype(int) != 0).numpy(), wanted)
    x = rng.standard_normal((2, 4, 6))
    own, layer = (
        kind(6, 2, dropout=0.1, batch_first=True)
        for kind in (nn.MultiHeadAttention, nn.MultiheadAttention)
    )
    values = own.init(0)
    causal = own.apply(values, x, causal=True).numpy()
    remedy = "td.where(mask, 0.0, -math.inf)"
    for training in (False, True):
        call = lambda: own.apply(values, x, bias=mask, training=training)  # noqa: B023, E731
        refused(call, td.DTypeError, "MultiHeadAttention", remedy, "True where a key is hidden")
    added = eval(remedy, {"td": td, "math": math, "mask": mask})
    np.testing.assert_allclose(own.apply(values, x, bias=added).numpy(), causal, atol=1e-6)
    with_int = {"attn_mask": mask.astype(int)}, {"key_padding_mask": np.ones((2, 4), int)}
    for given in with_int:
        call = lambda: layer.apply(values, x, x, x, **given)  # noqa: B023, E731
        refused(call, td.DTypeError, "attention", "mask == 0", "True where a key is hidden", *given)
    found = layer.apply(values, x, x, x, attn_mask=mask.astype(int) == 0)[0]
    np.testing.assert_allclose(found.numpy(), causal, atol=1e-6)


def test_stacks_take_masks_by_pytorchs_names() -> None:
    """By position and by name; `mask` of an encoder is the `src_mask` of its layers."""
    sizes = {"d_model": 6, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
    x, memory = torch.randn(2, 4, 6), torch.randn(2, 3, 6)
    later, padding = (
        ~torch.ones(4, 4).tril().bool(),
        torch.tensor([[False] * 4, [False] * 3 + [True]]),
    )
    hidden = torch.tensor([[False, True, False]] * 4)
    rows = [
        ("Encoder", (x,), {"mask": later}),
        ("Encoder", (x, later), {}),
        ("Encoder", (x,), {"mask": later, "src_key_padding_mask": padding}),
        ("Encoder", (x,), {"mask": later, "is_causal": True}),
        ("Decoder", (x, memory, later, hidden), {}),
        ("Decoder", (x, memory), {"tgt_mask": later, "tgt_key_padding_mask": padding}),
        ("Decoder", (x, memory), {"memory_mask": hidden, "tgt_mask": later, "tgt_is_causal": True}),
    ]
    for kind, given, masks in rows:
        make = getattr(torch.nn, f"Transformer{kind}Layer")(**sizes)
        twin = getattr(torch.nn, f"Transformer{kind}")(make, 2)
        layer = getattr(nn, f"Transformer{kind}Layer")(**sizes)
        ours = getattr(nn, f"Transformer{kind}")(layer, 2)
        values = {n: p.detach().numpy() for n, p in twin.state_dict().items()}
        found = ours.apply(
            values,
            *[t.numpy() for t in given],
            **{n: getattr(m, "numpy", lambda m=m: m)() for n, m in masks.items()},
        )
        wanted = twin.train()(*given, **masks).detach().numpy()
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 1)
    both = {"mask": later.numpy(), "src_mask": later.numpy()}
    call = lambda: encoder.apply(encoder.init(0), x.numpy(), **both)  # noqa: E731
    refused(call, td.ArgumentError, "TransformerEncoder", "mask and src_mask")
    mine = nn.TransformerEncoder(lambda: nn.Linear(6, 6), 2)  # layers that take no mask
    assert mine.apply(mine.init(0), x.numpy()).shape == (2, 4, 6)


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
