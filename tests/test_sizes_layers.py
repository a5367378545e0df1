"""Every layer with few features and many rows, compiled, beside PyTorch's: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import layer_rows
import treadle as td
from layer_cases import Case, Draw, built, case, chain, floats, integers
from sizes import MOST, SIZES, SOME, Problem, assert_near, check, every_size, options, rounded
from test_layers import EXCEPTIONS, prepared
from treadle import nn
from treadle.base import trees

Make = Callable[[int, int], Case]


def block(f: int, n: int) -> Case:
    return built("Sequential", lambda m: m.Sequential(m.Linear(f, f), m.Tanh()), floats(n, f))


def residual(f: int, n: int) -> Case:
    layers = chain(lambda m: m.Linear(f, f), lambda m: m.Softmax(-1))
    return layers._replace(inputs=(floats(n, f),))


def attention(f: int, n: int) -> Case:
    """Heads of two or three features where they divide, n sequences."""
    heads = next(h for h in (3, 2, 1) if f % h == 0 and h < f)
    given = {"embed_dim": f, "num_heads": heads, "batch_first": True}
    return case("MultiHeadAttention", given, floats(n, 3, f))


def long_attention(f: int, n: int) -> Case:
    """One head, n positions."""
    given = {"embed_dim": f, "num_heads": 1, "batch_first": True}
    return case("MultiHeadAttention", given, floats(1, n, f), causal=True)


def with_inputs(name: str, *shape: int) -> Make:
    """A layer without options, for inputs (batch, features, …)."""
    return lambda f, n: case(name, (), floats(n, f, *shape))


# Of features and batch: one of each layer.
ROWS: dict[str, Make] = {
    "Linear": lambda f, n: case("Linear", (f, f + 1), floats(n, f)),
    "Embedding": lambda f, n: case("Embedding", (f, f), integers(f, n)),
    "LayerNorm": lambda f, n: case("LayerNorm", (f,), floats(n, f)),
    "RMSNorm": lambda f, n: case("RMSNorm", (f, 1e-6), floats(n, f)),
    "Dropout": lambda f, n: case("Dropout", (0.5,), floats(n, f), modes=(False,)),
    "Conv1d": lambda f, n: case("Conv1d", (f, f, 3, 1, 1), floats(n, f, 4)),
    "Conv2d": lambda f, n: case("Conv2d", (f, 3, 2), floats(n, f, 3, 2)),
    "Conv3d": lambda f, n: case("Conv3d", (2, f, 2), floats(n, 2, 2, 3, 2)),
    "MaxPool2d": lambda f, n: case("MaxPool2d", (2,), floats(n, f, 4, 2)),
    "AvgPool2d": lambda f, n: case("AvgPool2d", (2, 1, 1), floats(n, f, 2, 3)),
    "BatchNorm1d": lambda f, n: case("BatchNorm1d", (f,), floats(n, f)),
    "BatchNorm2d": lambda f, n: case("BatchNorm2d", (f,), floats(n, f, 2, 3)),
    "MultiHeadAttention": attention,
    "RotaryEmbedding": lambda f, n: case("RotaryEmbedding", (2 * f,), floats(n, 2 * f)),
    "SwiGLU": lambda f, n: case("SwiGLU", (f, f + 1), floats(n, f)),
    "LSTM": lambda f, n: case("LSTM", (f, f), floats(2, n, f)),
    "GRU": lambda f, n: case("GRU", (f, f), floats(2, n, f)),
    "Sequential": block,
    "ModuleList": residual,
    "Flatten": with_inputs("Flatten", 2),
    "Softmax": lambda f, n: case("Softmax", (-1,), floats(n, f)),
    **{n: with_inputs(n) for n in ("Identity", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid")},
}
# Rows of the table of layers, by name. Those that give indices too have a test of their own.
BY_NAME: dict[str, list[Case]] = {}
for row in layer_rows.ROWS:
    if not getattr(row.ours(), "return_indices", False):
        BY_NAME.setdefault(row.name, []).append(row)
TOGETHER = {"Sequential", "ModuleList", "SwiGLU"}  # made of layers that have rows of their own
TOGETHER |= {"LSTM", "GRU", "MultiHeadAttention"}  # large programs: all pairs are slow tests
# Other forms of them, and all sizes of those.
MORE: dict[str, Make] = {
    **{name: ROWS[name] for name in sorted(TOGETHER)},
    "Linear to one": lambda f, n: case("Linear", (f, 1, False), floats(n, f)),
    "Embedding padded": lambda f, n: case("Embedding", (f, 3, 1), integers(f, n, 2)),
    "LayerNorm plain": lambda f, n: case("LayerNorm", ((f, 2), 1e-3, False), floats(n, f, 2)),
    "Dropout of nothing": lambda f, n: case("Dropout", (0.0,), floats(n, f)),
    "Conv2d depthwise": lambda f, n: case(
        "Conv2d", (f, f, 3, 1, 1, 1, f, False), floats(n, f, 2, 3)
    ),
    "BatchNorm1d eval": lambda f, n: case("BatchNorm1d", (f,), floats(n, f), modes=(False,)),
    "MultiHeadAttention long": long_attention,
    "GELU tanh": lambda f, n: case("GELU", {"approximate": "tanh"}, floats(n, f)),
    "Softmax over rows": lambda f, n: case("Softmax", (0,), floats(n, f)),
}


def arrays_of(c: Case) -> list[Any]:
    rng = np.random.default_rng(1)
    return trees.map_leaves(
        lambda x: rounded(x.array(rng) if isinstance(x, Draw) else x), list(c.inputs)
    )


def problem(c: Case) -> Problem:
    """Parameters and inputs have gradients; indices and running states have none."""
    ours, theirs, values = prepared(c)
    training = c.modes[-1]
    theirs.train(training)
    trained = {n: rounded(values[n]) for n, _ in ours.named_parameters()}
    arrays, structure = trees.flatten(arrays_of(c))
    inputs = {f"input {i}": a for i, a in enumerate(arrays)}
    keywords = {
        n: torch.tensor(v) if isinstance(v, np.ndarray) else v for n, v in c.keywords.items()
    }
    states = {n: rounded(a) for n, a in values.items() if n not in trained}
    constants = states | {n: a for n, a in inputs.items() if a.dtype.kind != "f"}
    given = trained | {n: a for n, a in inputs.items() if n not in constants}

    def split(floats: Any, fixed: Any) -> tuple[dict[str, Any], list[Any]]:
        both = {**floats, **fixed}
        arguments: list[Any] = structure.rebuild([both.pop(n) for n in inputs])
        return both, arguments

    def by_us(floats: Any, fixed: Any) -> Any:
        params, arguments = split(floats, fixed)
        return ours.apply(params, *arguments, training=training, **c.keywords)

    def by_torch(floats: Any, fixed: Any) -> Any:
        # PyTorch updates running states in place.
        params, arguments = split(floats, {n: t.clone() for n, t in fixed.items()})
        return torch.func.functional_call(theirs, params, tuple(arguments), keywords)

    return Problem(by_us, by_torch, given, constants)


def test_every_layer_has_rows_or_a_reason() -> None:
    public = {n for n, v in vars(nn).items() if isinstance(v, type) and not n.startswith("_")}
    assert ROWS.keys() | EXCEPTIONS.keys() | BY_NAME.keys() == public
    assert all(make(2, 7).name == name for name, make in ROWS.items())


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(name: str) -> None:
    sizes = SOME if name in TOGETHER else MOST
    every_size(lambda f, n: problem(ROWS[name](f, n)), sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_of_every_size(name: str) -> None:
    every_size(lambda f, n: problem(ROWS[name](f, n)), sizes=SIZES)


# One and three dimensions are the same code with other axes.
LIKE_OTHERS = [n for n in BY_NAME if n.endswith(("1d", "3d")) and f"{n[:-2]}2d" in BY_NAME]
LIKE_OTHERS += ["TransformerEncoder", "TransformerDecoder"]  # stacks of layers that have rows
LIKE_OTHERS += ["TransformerDecoderLayer"]  # what an encoder's has, and attention once more


@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in LIKE_OTHERS])
def test_rows_of_the_table(name: str) -> None:
    """Every configuration of a layer in one program."""
    check({f"{name} {i}": problem(c) for i, c in enumerate(BY_NAME[name])})


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_rows_of_other_dimensions(name: str) -> None:
    check({f"{name} {i}": problem(c) for i, c in enumerate(BY_NAME[name])})


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_values_and_gradients_of_other_forms(name: str) -> None:
    every_size(lambda f, n: problem(MORE[name](f, n)), sizes=SIZES)


class Norms(nn.Module):
    """One layer for each size, each called with its own input."""

    def __init__(self, name: str):
        self.layers = nn.ModuleList(ROWS[name](f, n).ours() for f, n in SIZES)

    def forward(self, inputs: list[td.Tensor]) -> list[td.Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d"])
def test_running_states(name: str) -> None:
    cases = [ROWS[name](f, n) for f, n in SIZES]
    inputs = [arrays_of(c)[0] for c in cases]
    specs = [td.Spec(x.shape) for x in inputs]
    forward = td.compile_forward(
        Norms(name), lambda m, b: m(b), specs, training=True, device="cpu", options=options()
    )
    for _ in range(2):
        forward(inputs)
    for i, (c, x) in enumerate(zip(cases, inputs, strict=True)):
        theirs = c.theirs().double()
        for _ in range(2):
            theirs(torch.as_tensor(x))
        for key, value in theirs.named_buffers():
            assert_near(forward.params[f"layers.{i}.{key}"], value.numpy(), f"{key} of {SIZES[i]}")
