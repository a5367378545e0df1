"""What PyTorch's code passes all day: accepted where it changes nothing, answered by name elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from refusals import refused
from treadle import nn
from treadle.nn.spelling import ACCEPTED

rng = np.random.default_rng(3)
FUNCTIONS = ["relu", "leaky_relu", "elu", "relu6", "hardtanh", "selu", "celu", "mish", "hardsigmoid", "hardswish", "silu"]  # fmt: skip
NEEDED: dict[str, tuple[Any, ...]] = {"Threshold": (0.1, 2.0)}


def classes_with(argument: str) -> list[str]:
    """Layers of both whose PyTorch constructor has an argument."""
    both = {n: m for n, m in vars(torch.nn).items() if inspect.isclass(m) and hasattr(nn, n)}
    layers = {n: m for n, m in both.items() if issubclass(m, torch.nn.Module)}
    return [n for n, m in layers.items() if argument in inspect.signature(m).parameters]


@pytest.mark.parametrize("name", classes_with("inplace"))
def test_layers_take_inplace(name: str) -> None:
    given = NEEDED.get(name, ())
    x = rng.standard_normal((2, 3, 4, 4, 4) if name.endswith("3d") else (2, 3, 4))
    x = x[..., None] if name.endswith("2d") else x
    theirs = getattr(torch.nn, name)(*given, inplace=True).eval()
    expected = theirs(torch.tensor(x.copy())).numpy()
    by_place = list(inspect.signature(getattr(torch.nn, name)).parameters).index("inplace")
    mine = list(inspect.signature(getattr(nn, name)).parameters).index("inplace")
    assert mine == by_place
    layer = getattr(nn, name)(*given, inplace=True)
    np.testing.assert_allclose(
        layer.apply(layer.init(0), x).numpy(), expected, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_inplace(name: str) -> None:
    x = rng.standard_normal(20)
    expected = getattr(F, name)(torch.tensor(x.copy()), inplace=True).numpy()
    np.testing.assert_allclose(getattr(td, name)(x, inplace=True).numpy(), expected, rtol=1e-9)


SMALL: dict[str, tuple[Any, ...]] = {
    "Linear": (3, 4), "Bilinear": (2, 3, 4), "Embedding": (5, 3), "EmbeddingBag": (5, 3), "LSTM": (3, 4),
    "GRU": (3, 4), "RNN": (3, 4), "LSTMCell": (3, 4), "GRUCell": (3, 4), "RNNCell": (3, 4), "LayerNorm": (4,),
    "RMSNorm": (4,), "GroupNorm": (2, 4), "MultiheadAttention": (8, 2), "TransformerEncoderLayer": (8, 2),
    "TransformerDecoderLayer": (8, 2), "PReLU": (),
    **{f"{k}Norm{n}d": (4,) for k in ("Batch", "Instance") for n in (1, 2, 3)},
    **{f"{k}{n}d": (3, 4, 2) for k in ("Conv", "ConvTranspose") for n in (1, 2, 3)},
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in classes_with("device") if n in SMALL])
def test_layers_take_no_device_and_no_dtype(name: str) -> None:
    make = getattr(nn, name)
    for dtype in (None, td.float32):
        assert isinstance(make(*SMALL[name], device=None, dtype=dtype), nn.Module)
    refused(lambda: make(*SMALL[name], device="cuda"), td.ArgumentError, name, "device=")
    refused(lambda: make(*SMALL[name], dtype=td.float64), td.ArgumentError, name, "precision=")


@pytest.mark.parametrize("argument", sorted(ACCEPTED))
def test_what_changes_nothing_is_accepted(argument: str) -> None:
    classes, values, _ = ACCEPTED[argument]
    for name in classes or ("Linear",):
        given = SMALL.get(name, ())
        if name == "TransformerEncoder":
            given = (nn.TransformerEncoderLayer(8, 2), 1)
        for value in values:
            assert isinstance(getattr(nn, name)(*given, **{argument: value}), nn.Module)
        theirs = inspect.signature(getattr(torch.nn, name)).parameters
        recurrent = name in ("LSTM", "GRU", "RNN")  # whose arguments PyTorch takes as keywords
        assert recurrent or argument in theirs
    if not classes:
        return
    with pytest.raises(TypeError, match=argument):
        nn.Linear(3, 4, **{argument: values[0]})


@pytest.mark.parametrize(("name", "argument", "value"), [
    ("LSTM", "proj_size", 2), ("MultiheadAttention", "add_bias_kv", True),
    ("MultiheadAttention", "add_zero_attn", True), ("Embedding", "max_norm", 1.0), ("Embedding", "sparse", True),
])  # fmt: skip
def test_what_would_change_something_is_answered(name: str, argument: str, value: Any) -> None:
    make = lambda: getattr(nn, name)(*SMALL[name], **{argument: value})  # noqa: E731
    refused(make, td.ArgumentError, name, f"{argument}=")


def loaded(ours: nn.Module, theirs: torch.nn.Module) -> dict[str, Any]:
    values = {n: t.detach().numpy() for n, t in theirs.state_dict().items()}
    known = ours.init(0)
    assert known.keys() == values.keys()
    return {n: values[n].astype(np.asarray(known[n]).dtype) for n in known}


NORMS = [("BatchNorm2d", (4,), {}), ("InstanceNorm2d", (4,), {"affine": True}), ("GroupNorm", (2, 4), {}), ("LayerNorm", (3,), {})]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "options"), NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_norms_without_a_bias(name: str, given: Any, options: Any, training: bool) -> None:
    theirs = getattr(torch.nn, name)(*given, **options, bias=False).train(training)
    with torch.no_grad():
        theirs.weight.copy_(torch.linspace(0.5, 2.0, theirs.weight.numel()))
    ours = getattr(nn, name)(*given, **options, bias=False)
    x = rng.standard_normal((2, 4, 3, 3)).astype(np.float32)
    values = loaded(ours, theirs)
    expected = theirs(torch.tensor(x)).detach().numpy()
    found = ours.apply(values, x, training=training)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("has_state", [True, False])
def test_sequences_without_a_batch_axis(name: str, batch_first: bool, has_state: bool) -> None:
    options = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    theirs, ours = (getattr(m, name)(3, 4, **options) for m in (torch.nn, nn))
    x = rng.standard_normal((5, 3)).astype(np.float32)
    state = rng.standard_normal((4, 4)).astype(np.float32)
    states = (state, -state) if name == "LSTM" else state
    tensors = tuple(map(torch.tensor, states)) if name == "LSTM" else torch.tensor(states)
    expected = theirs(torch.tensor(x), *([tensors] if has_state else []))
    found = ours.apply(loaded(ours, theirs), x, *([states] if has_state else []))
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a.shape == tuple(b.shape)
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)


def flat(found: Any) -> list[Any]:
    parts = found if isinstance(found, tuple) else (found,)
    return [t for p in parts for t in (p if isinstance(p, tuple) else (p,))]


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_without_a_batch_axis(batch_first: bool) -> None:
    theirs, ours = (m.MultiheadAttention(8, 2, batch_first=batch_first) for m in (torch.nn, nn))
    q, k = (rng.standard_normal((n, 8)).astype(np.float32) for n in (5, 7))
    hidden = np.arange(7) > 4
    options = {"average_attn_weights": True}
    expected = theirs(*map(torch.tensor, (q, k, k)), torch.tensor(hidden), **options)
    found = ours.apply(loaded(ours, theirs), q, k, k, hidden, **options)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == tuple(b.shape)
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_a_row_of_padding_gets_no_gradient(padding_idx: int | None) -> None:
    table, index = rng.standard_normal((4, 3)), np.array([0, 3, 1, 3])
    leaf = torch.tensor(table, requires_grad=True)
    (F.embedding(torch.tensor(index), leaf, padding_idx=padding_idx) ** 2).sum().backward()
    found = td.grad(lambda w: (td.embedding(index, w, padding_idx) ** 2).sum())(table)
    np.testing.assert_allclose(found.numpy(), leaf.grad.numpy())
    refused(lambda: td.embedding(index, table, 4), td.IndexRangeError, "embedding", "4 rows")


def test_devices_are_answered() -> None:
    x = td.zeros((2,))
    refused(lambda: x.to("cuda:0"), td.ArgumentError, "to", "is a device")
    assert nn.Identity(54, unused=True).apply({}, x).shape == (2,)
