"""What NumPy does without a word is not done to a user's numbers: masks, ranges, warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import data, nn, optim
from treadle.base import dtypes
from treadle.base.arrays import lost_range

MASKED = np.ma.array(np.ones((3, 2), np.float32), mask=[[0, 1], [0, 0], [0, 0]])
DEVICES = ["cpu", "oracle"]


def loss(model: nn.Module, x: td.Tensor) -> td.Tensor:
    return (model(x) ** 2).mean()


def make(device: str) -> td.TrainStep:
    return td.compile_step(nn.Linear(2, 1), loss, optim.sgd(0.1), td.Spec((3, 2)), device=device)


# Masks


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_batch(device: str) -> None:
    step = make(device)
    for call in (step, step.evaluate, step.gradients, lambda x: step.run([x])):
        with pytest.raises(td.BatchError, match=r"is a masked array \(1 of 6 masked\)"):
            call(MASKED)
    assert step.count == 0
    step(np.ma.array(np.ones((3, 2), np.float32)))  # nothing is masked: nothing is lost


@pytest.mark.parametrize(
    "call",
    [
        lambda: td.tensor(MASKED),
        lambda: td.ones((3, 2)) * MASKED,
        lambda: td.compile(lambda x: x + MASKED, td.Spec((3, 2))),
        lambda: td.compile_step({"w": MASKED}, lambda m, x: (m["w"] * x).sum(), optim.sgd(1), MASKED),
        lambda: data.ArrayLoader({"x": MASKED}, 1),
        lambda: data.split({"x": MASKED}, (0.5, 0.5)),
        lambda: list(data.IterableLoader([{"x": MASKED}])),
        lambda: list(data.IterableLoader([{"x": row} for row in MASKED], 2)),
        lambda: data.columns_matrix({"a": MASKED[:, 1]}),
    ],
)  # fmt: skip
def test_masked_arrays_elsewhere(call: Callable[[], object]) -> None:
    with pytest.raises(td.TreadleError, match=r"masked array .*x\.filled"):
        call()


def test_masked_parameters() -> None:
    step = make("cpu")
    wrong = step.params | {"weight": np.ma.array([[1.0, 2.0]], mask=[[1, 0]])}
    with pytest.raises(td.LoadError, match="weight is a masked array"):
        step.load_params(wrong)


# Ranges


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_the_range(device: str) -> None:
    step = td.compile_step(
        nn.Linear(2, 1),
        lambda m, b: loss(m, b["x"]),
        optim.sgd(0.1),
        {"x": td.Spec((3, 2))},
        device=device,
    )
    x = np.ones((3, 2))
    x[1, 1] = -1e39
    with pytest.raises(td.BatchError, match=r"x has the value -1e\+39, which float32 cannot hold"):
        step({"x": x})
    x[1, 1] = np.inf  # infinities are what they are
    step({"x": x})
    x[1, 1] = np.nan
    step({"x": x})


def test_parameters_beyond_the_range() -> None:
    step = make("cpu")
    with pytest.raises(td.LoadError, match=r"weight has the value 1e\+60"):
        step.load_params(step.params | {"weight": np.array([[1e60, 0]])})
    with pytest.raises(td.ArgumentError, match=r"first value of weight has the value 1e\+60"):
        nn.Linear.init(_constant(1e60), 0)


def _constant(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    model.weight.init = nn.init.constant(value)
    return model


def test_the_oracle_takes_back_what_it_gave() -> None:
    """It holds floats as float64, so nothing is lost there."""
    step = make("oracle")
    step.load_params(step.params | {"weight": np.array([[1e60, 0]])})
    assert step.params["weight"][0, 0] == 1e60


def test_tensors_beyond_the_range() -> None:
    for given in ([1e60], 1e60, [[0.0], [-1e60]]):
        with pytest.raises(td.ArgumentError, match="which float32 cannot hold.*td.float64"):
            td.tensor(given)
    with pytest.raises(td.ArgumentError, match="which float16 cannot hold"):
        td.tensor([1e6], td.float16)
    assert td.tensor(np.array([1e60])).dtype is td.float64
    assert td.tensor([np.inf, np.nan]).dtype is td.float32


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16])
def test_exactly_what_rounds_to_infinity_is_lost(dtype: dtypes.DType) -> None:
    """Half a step beyond the largest still rounds down to it."""
    largest, after = dtype.largest, dtype.largest * (1 + 2.0 ** -(dtype.fraction_bits + 1))
    step = largest - float(np.nextafter(np.float64(largest), 0))
    for value in (largest, largest + step, after * 0.9999999, after * 1.0000001, -after * 1.01):
        array = np.array([0.0, value, np.nan, np.inf])
        with np.errstate(over="ignore"):
            is_lost = bool(np.isinf(np.array([value]).astype(dtype.numpy))[0])
        assert (lost_range(array, dtype) is not None) == is_lost
    assert lost_range(np.array([], np.float64), dtype) is None


def test_narrower_arrays_are_not_looked_at() -> None:
    class Watched(np.ndarray):
        def min(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("looked at")

    for given in (np.float32, np.float16):
        assert lost_range(np.ones(3, given).view(Watched), dtypes.float32) is None


# Tables


def table(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("value", ["1e400", "-1e999", "1" + "0" * 400 + ".5"])
def test_numbers_that_no_float_holds(value: str, tmp_path: Path) -> None:
    for text, line in ((f"a,b\n1,2\n3,{value}\n", 3), (f"a,b\n1,{value}\n", 2)):
        with pytest.raises(td.LoadError, match=rf"line {line}, column 2 \('b'\).*64 bits hold"):
            data.read_csv(table(tmp_path, text))


def test_infinity_as_text_is_read(tmp_path: Path) -> None:
    found = data.read_csv(table(tmp_path, "a\n1.5\ninf\n-Infinity\n"))
    np.testing.assert_array_equal(found["a"], [1.5, np.inf, -np.inf])


def test_a_matrix_names_the_column_and_row(tmp_path: Path) -> None:
    found = data.read_csv(table(tmp_path, "a,b\n1,2\n3,4.5\n5,1e300\n"))
    with pytest.raises(td.ArgumentError, match=r"b has the value 1e\+300.*\(row 2\)"):
        data.columns_matrix(found)


# Numbers in programs


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


HALF = np.array([1e-3, 1.0, -2.0, 0.0, 60000.0], np.float16)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: x * 1e6, lambda x: x * 1e6),
        (lambda x: 1e6 * x, lambda x: x * 1e6),
        (lambda x: x / 1e6, lambda x: x / 1e6),
        (lambda x: x + 1e6, lambda x: x + 1e6),
        (lambda x: x - 70000, lambda x: x - 70000),
        (lambda x: x * np.float32(1e6), lambda x: x * 1e6),
        (lambda x: td.maximum(x, -1e6), lambda x: x),
        (lambda x: td.clamp(x, -1e6, 1e6), lambda x: x),
        (lambda x: td.where(x > 0, x, -1e9), lambda x: np.where(x > 0, x, -np.inf)),
    ],
)
def test_numbers_beyond_float16_are_those_of_pytorch(
    function: Callable[[Any], Any], exact: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Only the result is rounded, to an infinity if it must be; nothing is said about it."""
    with np.errstate(over="ignore"):
        expected = exact(HALF.astype(np.float64)).astype(np.float16)
    for device in DEVICES:
        found = td.compile(function, td.Spec((5,), td.float16), device=device)(HALF)
        np.testing.assert_array_equal(np.asarray(found, np.float16), expected)
    np.testing.assert_array_equal(function(td.tensor(HALF)).numpy(), expected)


def test_numbers_beyond_float16_in_mixed_precision() -> None:
    """A constant that the narrow dtype has not is computed with in float32."""

    def function(model: nn.Module, x: td.Tensor) -> td.Tensor:
        return (model(x) / 1e6).sum() * 1e6

    spec = td.Spec((3, 2))
    results = [
        td.compile_forward(nn.Linear(2, 1), function, spec, precision=p)(
            np.ones((3, 2), np.float32)
        )
        for p in ("float32", "float16")
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-2)
    assert results[0] != 0


@pytest.mark.parametrize("dtype", [td.float16, td.float32])
def test_a_number_beyond_every_float(dtype: Any) -> None:
    with pytest.raises(td.ArgumentError, match="beyond every float"):
        td.ones((2,), dtype) + 10**400


def test_a_number_beyond_float32_is_infinite() -> None:
    """As in PyTorch: Python's numbers take the dtype of the tensor they meet."""
    assert (td.ones((1,)) * 1e60).numpy()[0] == np.inf
    assert td.compile(lambda x: x * 1e60, td.Spec((1,)))(np.ones(1, np.float32))[0] == np.inf


def test_one_number_seen_as_a_large_array_is_looked_at_once() -> None:
    for value, is_lost in ((0.0, False), (1e60, True), (np.inf, False)):
        many = np.broadcast_to(np.float64(value), (1 << 20, 1 << 20))  # no time for all of them
        assert (lost_range(many, dtypes.float32) is not None) == is_lost
