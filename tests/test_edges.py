"""Ties and edges: values and subgradients are PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td

NAN, INF = float("nan"), float("inf")


def check(ours, theirs, *arrays: list) -> None:
    """Values and gradients of a sum with uneven weights, both in float64."""
    inputs = [np.array(a, np.float64) for a in arrays]
    leaves = [torch.tensor(a, requires_grad=True) for a in inputs]
    expected = theirs(*leaves)
    weights = np.arange(1, expected.numel() + 1, dtype=np.float64).reshape(expected.shape)
    result = ours(*map(td.tensor, inputs))
    np.testing.assert_array_equal(result.numpy(), expected.detach().numpy())
    gradients = torch.autograd.grad((expected * torch.tensor(weights)).sum(), leaves)
    found = td.grad(lambda *xs: (ours(*xs) * weights).sum(), tuple(range(len(inputs))))(*inputs)
    for a, b in zip(found, gradients, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-14, atol=0)


UNARY = {
    "relu": (td.relu, F.relu, [-1.0, -0.0, 0.0, 2.0, NAN, INF, -INF]),
    "abs": (td.abs, torch.abs, [-1.0, 0.0, 2.0, -INF]),
    "sqrt": (td.sqrt, torch.sqrt, [0.0, 4.0, INF]),
    "rsqrt": (td.rsqrt, torch.rsqrt, [0.0, 4.0]),
    "log": (td.log, torch.log, [0.0, 1.0, INF]),
    "clamp": (lambda x: td.clamp(x, -1, 2), lambda x: x.clamp(-1, 2), [-2.0, -1.0, 0.0, 2.0, 3.0]),
    "clamp_min": (lambda x: td.clamp(x, min=0), lambda x: x.clamp(min=0), [-1.0, 0.0, 1.0]),
    "leaky_relu": (td.leaky_relu, F.leaky_relu, [-1.0, 0.0, 1.0]),
    "elu": (td.elu, F.elu, [-1.0, 0.0, 1.0, 800.0]),
    "softplus": (td.softplus, F.softplus, [-40.0, -800.0, 19.5, 20.0, 20.5, 800.0]),
    "max_ties": (lambda x: td.max(x), lambda x: x.amax(), [3.0, 1.0, 3.0, 3.0]),
    "min_ties": (lambda x: td.min(x), lambda x: x.amin(), [1.0, 1.0, 3.0]),
    "prod_one_zero": (lambda x: td.prod(x), torch.prod, [2.0, 0.0, 3.0, 5.0]),
    "prod_two_zeros": (lambda x: td.prod(x), torch.prod, [2.0, 0.0, 3.0, 0.0]),
    "logsumexp_inf": (lambda x: td.logsumexp(x), lambda x: x.logsumexp(0), [-INF, 1.0, 2.0]),
    "sort_ties": (lambda x: td.sort(x)[0], lambda x: x.sort(stable=True)[0], [2.0, 1.0, 2.0, 1.0]),
    "topk": (lambda x: td.topk(x, 2)[0], lambda x: x.topk(2)[0], [2.0, 1.0, 5.0, 3.0]),
    "floor": (td.floor, torch.floor, [-0.5, 1.0, 1.5]),
    "sign": (td.sign, torch.sign, [-2.0, 0.0, 3.0]),
    "asin": (td.asin, torch.asin, [-1.0, 1.0, 0.0, -0.0, 2.0, NAN]),
    "acos": (td.acos, torch.acos, [-1.0, 1.0, 0.0, -2.0, NAN]),
    "atan": (td.atan, torch.atan, [-INF, INF, 0.0, -0.0, NAN, 1e30]),
    "pow_2": (lambda x: x**2, lambda x: x**2, [-2.0, 0.0, 3.0]),
    "pow_5": (lambda x: x**5, lambda x: x**5, [-2.0, 0.0, 3.0]),
}


@pytest.mark.filterwarnings("ignore::treadle.UnreachedWarning")  # floor and sign have none
@pytest.mark.parametrize("name", UNARY)
def test_unary_edges(name: str) -> None:
    check(*UNARY[name])


BINARY = {
    "maximum": (td.maximum, torch.maximum, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0]),
    "minimum": (td.minimum, torch.minimum, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0]),
    "pow": (td.pow, torch.pow, [0.0, 0.0, 0.0, 2.0, 3.0], [0.0, 1.0, 2.0, 0.0, 1.5]),
    "atan2": (
        td.atan2,
        torch.atan2,
        [0.0, -0.0, 0.0, -0.0, INF, -INF, INF, 1.0, -1.0, NAN, 1.0, 1.0],
        [0.0, 0.0, -0.0, -1.0, INF, -INF, 2.0, INF, -INF, 1.0, NAN, 0.0],
    ),
    "remainder": (td.remainder, torch.remainder, [5.5, -5.5, 5.5], [2.0, 2.0, -2.0]),
    "where_nan": (
        lambda x, y: td.where(x > 0, x, y),
        lambda x, y: torch.where(x > 0, x, y),
        [1.0, -1.0, NAN],
        [NAN, 2.0, 3.0],
    ),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_edges(name: str) -> None:
    check(*BINARY[name])


def test_max_pool_gives_ties_to_the_first() -> None:
    x = [[[[1.0, 1.0, 0.0, 2.0], [1.0, 0.0, 2.0, 2.0]]]]
    check(lambda x: td.max_pool(x, 2), lambda x: F.max_pool2d(x, 2), x)


def test_extremes_and_indices_with_nan_as_pytorch() -> None:
    x = np.array([[1.0, NAN, 3.0], [2.0, 2.0, 1.0]])
    t, ours = torch.tensor(x), td.tensor(x)
    np.testing.assert_array_equal(td.max(ours, 1).numpy(), t.amax(1).numpy())
    np.testing.assert_array_equal(td.argmax(ours, 1).numpy(), t.argmax(1).numpy())
    np.testing.assert_array_equal(td.argmin(ours, 1).numpy(), t.argmin(1).numpy())
    np.testing.assert_array_equal(td.sort(ours, 1)[0].numpy(), t.sort(1)[0].numpy())
    values, indices = td.sort(ours, 1, descending=True)
    expected = t.sort(dim=1, descending=True, stable=True)
    np.testing.assert_array_equal(values.numpy(), expected[0].numpy())
    np.testing.assert_array_equal(indices.numpy(), expected[1].numpy())


def test_softmax_of_a_row_of_minus_infinity_is_nan_as_in_pytorch() -> None:
    x = np.array([[-INF, -INF], [0.0, -INF]])
    expected = torch.tensor(x).softmax(-1).numpy()
    np.testing.assert_array_equal(td.softmax(td.tensor(x)).numpy(), expected)


def test_second_derivative_of_a_product_with_a_zero() -> None:
    def mixed(x):
        return td.grad(lambda x: td.prod(x))(x)[1]

    x = np.array([0.0, 2.0, 5.0])
    np.testing.assert_array_equal(td.grad(mixed)(x).numpy(), [5.0, 0.0, 0.0])


def test_integers_wrap() -> None:
    top = td.tensor(np.array([2**31 - 1], np.int32))
    assert (top + 1).numpy()[0] == -(2**31)
    assert (td.tensor(np.array([0], np.uint32)) - 1).numpy()[0] == 2**32 - 1


def test_log1p_is_exact_for_small_numbers() -> None:
    x = np.array([1e-20, -1e-17, 1e-10, 0.5, 1e3])
    np.testing.assert_allclose(td.log1p(td.tensor(x)).numpy(), np.log1p(x), rtol=4e-16)


def test_attention_rows_that_see_nothing_are_zero_as_in_pytorch() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, 3, 2)) for _ in range(3))
    bias = np.zeros((3, 3))
    bias[1] = -INF
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=torch.tensor(bias))
    gradients = torch.autograd.grad((expected**2).sum(), leaves)

    def loss(q, k, v):
        return (td.attention(q, k, v, bias=bias) ** 2).sum()

    found = td.attention(td.tensor(q), td.tensor(k), td.tensor(v), bias=td.tensor(bias))
    np.testing.assert_allclose(found.numpy(), expected.detach().numpy(), rtol=1e-12, atol=1e-15)
    for a, b in zip(td.grad(loss, (0, 1, 2))(q, k, v), gradients, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10, atol=1e-14)
