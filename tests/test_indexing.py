"""x[...] against NumPy, and its gradient against PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import treadle as td
from treadle.domains.float64 import evaluate_float64

X = np.arange(2 * 3 * 4 * 5, dtype=np.float64).reshape(2, 3, 4, 5)

BASIC: list[Any] = [
    0,
    -1,
    np.int64(1),
    (),
    ...,
    None,
    (0, -1, 2, 3),
    (1, ..., -2),
    (..., 0),
    slice(None),
    slice(1, None),
    (slice(None), slice(0, 2), slice(1, 3)),
    (slice(None), slice(None, None, 2), slice(1, None, 3)),
    (slice(None, None, -1), slice(None, None, -2), slice(3, 0, -1)),
    (slice(None), slice(-2, None), slice(-10, 10)),
    (slice(None), slice(2, 1), slice(0, 0, -1)),
    (0, slice(None, None, -1), None, ..., 2),
    (None, slice(1), None, 0, None),
    (..., None),
    (slice(None), 1, ..., slice(4, 1, -2), None),
]
I = np.array([1, 0, 1])  # noqa: E741
J = np.array([[0], [2]])
ADVANCED: list[Any] = [
    [0, 1, 1],
    [-1, 0],
    (slice(None), [2, -3, 0]),
    (..., [0, 4, -1]),
    (slice(None), slice(None), np.array([[0, 1], [3, -4]])),
    (I, [2, 1, 0]),  # adjacent, at the front
    (slice(None), I, [2, 1, 0]),  # adjacent, in the middle
    (..., I, [2, 1, 0]),  # adjacent, at the end
    (I, slice(None), [2, 1, 0]),  # not adjacent: the new axes come first
    (slice(None), I, slice(None), [2, -1, 0]),
    (I, J),  # broadcast together
    (slice(None), J, I[None]),
    (J // 2, slice(1, 3), I, slice(None, None, -2)),
    (I, J, -1),
    (0, [0, -1]),
    (I, [0, 1, 2], [3, 2, 1], [-1, -2, -3]),
    (None, I, None, [0, 2, 1]),
    (I, None, [0, 2, 1]),
    np.array([], np.int32),
    (slice(None), []),
    np.array(1, np.int32),
    (slice(None), np.array([0, 2], np.uint8)),
]


def as_tensors(index: Any) -> Any:
    """The same index with arrays and lists as tensors."""
    if isinstance(index, tuple):
        return tuple(as_tensors(item) for item in index)
    if isinstance(index, list):
        return td.tensor(index, td.int32)
    return td.tensor(index) if isinstance(index, np.ndarray) else index


@pytest.mark.parametrize("index", BASIC + ADVANCED, ids=repr)
def test_index_as_numpy(index: Any) -> None:
    expected = X[index]
    np.testing.assert_array_equal(td.tensor(X)[index].numpy(), expected)
    graph = td.trace(lambda x: x[index], X)
    np.testing.assert_array_equal(evaluate_float64(graph, {"x": X})[0], expected)


@pytest.mark.parametrize("index", ADVANCED, ids=repr)
def test_index_with_tensors(index: Any) -> None:
    expected = X[index]
    np.testing.assert_array_equal(td.tensor(X)[as_tensors(index)].numpy(), expected)


def test_index_with_traced_tensors() -> None:
    graph = td.trace(lambda x, i, j: x[i, :, j], X, I, J)
    (found,) = evaluate_float64(graph, {"x": X, "i": I, "j": J})
    np.testing.assert_array_equal(found, X[I, :, J])


@pytest.mark.parametrize("index", [(0, slice(None), [1, 2]), (slice(None), [0, 1], slice(None), 0)])
def test_ints_are_taken_first_as_in_torch(index: Any) -> None:
    expected = torch.from_numpy(X)[index].numpy()
    assert expected.shape != X[index].shape or not np.array_equal(expected, X[index])
    np.testing.assert_array_equal(td.tensor(X)[index].numpy(), expected)


def test_narrow_indices_reach_beyond_their_own_range() -> None:
    x = np.arange(300.0)
    for dtype in (np.int8, np.uint8):
        index = td.tensor(np.array([0, 3, 100], dtype))
        np.testing.assert_array_equal(td.tensor(x)[index].numpy(), [0, 3, 100])
    minus = td.tensor(np.array([-1, -128], np.int8))
    np.testing.assert_array_equal(td.tensor(x)[minus].numpy(), [299, 172])
    table = td.tensor(x.reshape(3, 100))
    rows, columns = (td.tensor(np.array(i, np.int8)) for i in ([2, -1], [99, -100]))
    np.testing.assert_array_equal(table[rows, columns].numpy(), [299, 200])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_basic_index_property(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    x = np.arange(np.prod(shape, dtype=int)).astype(np.float64).reshape(shape)
    np.testing.assert_array_equal(td.tensor(x)[index].numpy(), x[index])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_integer_array_property(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4))
    index = data.draw(hnp.integer_array_indices(shape, dtype=np.dtype(np.int32)))
    x = np.arange(np.prod(shape, dtype=int)).astype(np.float64).reshape(shape)
    np.testing.assert_array_equal(td.tensor(x)[index].numpy(), x[index])


def test_iteration_and_length() -> None:
    x = td.tensor(X)
    assert len(x) == 2
    np.testing.assert_array_equal(np.stack([row.numpy() for row in x]), X)


GRADIENTS: list[Any] = [
    0,
    (1, ..., -2),
    (slice(None), slice(None, None, 2), slice(1, None, 3)),
    (None, slice(1), None, 0),
    (slice(None), slice(2, 1)),
    [0, 0, 1],  # repeats add up
    (slice(None), [2, -3, 2, 0]),
    (I, J),
    (I, slice(None), [2, 1, 2]),
    (slice(None), J, I[None], slice(0, 4, 3)),
    (0, [0, -1, 0], ..., None),
]


@pytest.mark.parametrize("index", GRADIENTS, ids=repr)
def test_gradient_as_torch(index: Any) -> None:
    weights = np.random.default_rng(0).normal(size=td.tensor(X)[index].shape)
    gradient = td.grad(lambda x: (x[index] ** 2 * weights).sum())(X)
    x = torch.from_numpy(X.copy()).requires_grad_()
    (x[index] ** 2 * torch.from_numpy(weights)).sum().backward()
    np.testing.assert_allclose(gradient.numpy(), x.grad.numpy(), rtol=1e-14)


def test_gradient_through_a_negative_step() -> None:
    index = (slice(None), slice(None, None, -1), slice(3, 0, -2))
    weights = np.random.default_rng(0).normal(size=X[index].shape)
    gradient = td.grad(lambda x: (x[index] * weights).sum())(X)
    expected = np.zeros_like(X)
    expected[index] = weights
    np.testing.assert_array_equal(gradient.numpy(), expected)


# Windows whose start is data


@pytest.mark.parametrize("device", ["cpu", "oracle"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_starts_may_mix_numbers_and_traced_scalars(device: str, dtype: type) -> None:
    """As a cache of keys needs them: `dynamic_update_slice(cache, row, (0, 0, position, 0))`."""
    cache = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    row = -np.ones((2, 3, 1, 4), np.float32)

    def function(x, update, position):
        starts = (0, np.int64(0), position, 0)
        return td.dynamic_update_slice(x, update, starts), td.dynamic_slice(
            x, [0, 1, position, 0], (2, 2, 2, 4)
        )

    kind = td.int32 if dtype is np.int32 else td.int64
    specs = (td.Spec(cache.shape), td.Spec(row.shape), td.Spec((), kind))
    program = td.compile(function, *specs, device=device)
    for position in range(5):
        updated, window = program(cache, row, dtype(position))
        expected = cache.copy()
        expected[:, :, position : position + 1] = row
        np.testing.assert_array_equal(updated, expected)
        start = min(position, 3)  # moved to lie inside
        np.testing.assert_array_equal(window, cache[:, 1:3, start : start + 2])


def test_starts_of_parameters_states_and_eager_tensors() -> None:
    x = td.tensor(np.arange(12.0, dtype=np.float32).reshape(3, 4))
    found = td.dynamic_slice(x, (td.tensor(1), 2), (1, 2))
    np.testing.assert_array_equal(found.numpy(), [[6, 7]])

    class Cache(td.nn.Module):
        def __init__(self) -> None:
            self.at = td.nn.State((), dtype=td.int32)

        def forward(self, rows):
            td.update(self.at, self.at + 1)
            return td.dynamic_slice(rows, (self.at, 0), (1, 4))

    program = td.compile_forward(Cache(), lambda m, rows: m(rows), td.Spec((3, 4)))
    for i in range(3):
        np.testing.assert_array_equal(program(x.numpy())[0], x.numpy()[i])


@pytest.mark.parametrize("wrong", [td.ones((1,), td.int32), td.ones(()), td.ones((), td.bool_)])
def test_starts_are_scalars_of_integers(wrong: td.Tensor) -> None:
    x = td.ones((3, 4))
    for call in (
        lambda: td.dynamic_slice(x, (wrong, 0), (1, 1)),
        lambda: td.dynamic_update_slice(x, td.ones((1, 1)), (0, wrong)),
    ):
        with pytest.raises(td.ShapeError, match="a start is .*, not one integer"):
            call()
