"""Every loss with few classes and many rows, compiled, beside PyTorch's: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sizes import SIZES, Problem, every_size
from test_losses import THEIRS
from treadle import losses

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total:UserWarning")

# Each is a program's own part: a mean beside the rows would have them kept in memory.
REDUCTIONS, OTHERS = ("none", "mean"), ("sum", "batchmean")
Arrays = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def normal(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    return rng.standard_normal((n, f))


def chances(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    return rng.uniform(0.05, 0.95, (n, f))


def distributions(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    return rng.dirichlet(np.ones(f), n) * 0.9 + 0.1 / f


def log_chances(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    return np.log(distributions(rng, f, n))


def classes(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    return rng.integers(0, f, n).astype(np.int32)


def some_ignored(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    found = classes(rng, f, n)
    found[::3] = -100
    return found


def of_each(rng: np.random.Generator, f: int, n: int) -> np.ndarray:
    """A weight for each class."""
    return rng.uniform(0.5, 2.0, f)


class Row:
    """A loss of `input` and `target`, with further operands by name and plain options."""

    def __init__(self, name: str, input: Draw, target: Draw, weights: Any = None, **options: Any):
        self.name, self.input, self.target = name, input, target
        self.weights: dict[str, Draw] = weights or {}
        self.options = options

    def problem(self, f: int, n: int, reduction: str) -> Problem:
        """The input has a gradient, and so has a target of floats that may have one."""
        rng = np.random.default_rng(f * n)
        floats, constants = {"input": self.input(rng, f, n)}, Arrays()
        target = self.target(rng, f, n)
        is_trained = target.dtype.kind == "f" and self.name not in ("bce", "kl_div")
        (floats if is_trained else constants)["target"] = target
        constants |= {name: draw(rng, f, n) for name, draw in self.weights.items()}
        pair = getattr(losses, self.name), THEIRS[self.name]
        return Problem(*(self.caller(p, reduction) for p in pair), floats, constants)

    def caller(self, function: Callable[..., Any], reduction: str) -> Callable[..., Any]:
        def call(floats: Any, constants: Any) -> Any:
            given = {**floats, **constants}
            x, y = given.pop("input"), given.pop("target")
            return function(x, y, reduction=reduction, **given, **self.options)

        return call


ROWS = {
    "mse": Row("mse", normal, normal),
    "l1": Row("l1", normal, normal),
    "huber": Row("huber", normal, normal, delta=0.7),
    "cross_entropy": Row("cross_entropy", normal, classes, label_smoothing=0.1),
    "nll": Row("nll", log_chances, some_ignored, {"weight": of_each}),
    "bce": Row("bce", chances, chances),
    "bce_with_logits": Row("bce_with_logits", normal, chances, {"pos_weight": of_each}),
    "kl_div": Row("kl_div", log_chances, distributions),
}
# Other forms of them.
MORE = {
    "cross_entropy plain": Row("cross_entropy", normal, classes),
    "cross_entropy weighted": Row("cross_entropy", normal, some_ignored, {"weight": of_each}),
    "cross_entropy of distributions": Row("cross_entropy", normal, distributions),
    "kl_div of logarithms": Row("kl_div", log_chances, log_chances, log_target=True),
}


def head(f: int, n: int, reduction: str) -> Problem:
    """`linear_cross_entropy` of rows (n, f) and as many classes as features."""
    rng = np.random.default_rng(f * n)
    floats = {"input": normal(rng, f, n), "weight": normal(rng, f, f), "bias": of_each(rng, f, n)}

    def ours(floats: Any, constants: Any) -> Any:
        given = (floats["input"], floats["weight"], constants["target"])
        bias = floats["bias"]
        return losses.linear_cross_entropy(*given, linear_bias=bias, reduction=reduction)

    def theirs(floats: Any, constants: Any) -> Any:
        logits = F.linear(floats["input"], floats["weight"], floats["bias"])
        return F.cross_entropy(logits, constants["target"].to(torch.int64), reduction=reduction)

    return Problem(ours, theirs, floats, {"target": some_ignored(rng, f, n)})


MAKES = {name: row.problem for name, row in ROWS.items()} | {"linear_cross_entropy": head}


def test_every_loss_has_a_row() -> None:
    assert MAKES.keys() == {*THEIRS, "linear_cross_entropy"}
    assert all(row.name == name for name, row in ROWS.items())


@pytest.mark.parametrize("name", MAKES)
def test_values_and_gradients(name: str) -> None:
    every_size(*(partial(MAKES[name], reduction=r) for r in REDUCTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_values_and_gradients_of_every_size(name: str) -> None:
    every_size(*(partial(MAKES[name], reduction=r) for r in REDUCTIONS), sizes=SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_values_and_gradients_of_other_forms(name: str) -> None:
    every_size(*(partial(MORE[name].problem, reduction=r) for r in REDUCTIONS), sizes=SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_values_and_gradients_of_sums(name: str) -> None:
    chosen = OTHERS if name == "kl_div" else OTHERS[:1]
    every_size(*(partial(MAKES[name], reduction=r) for r in chosen), sizes=SIZES)
