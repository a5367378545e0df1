"""Every loss beside PyTorch's in float64, its edges, and the arithmetic of `td.Mean`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from refusals import refused
from treadle import losses
from treadle.frontend.mean import Mean

TOLERANCE = 1e-10
REDUCTIONS = ("mean", "sum", "none")
rng = np.random.default_rng(0)


class Case(NamedTuple):
    name: str
    input: np.ndarray
    target: np.ndarray
    options: dict[str, Any]


def case(name: str, input: Any, target: Any, **options: Any) -> Case:
    return Case(name, np.asarray(input, np.float64), np.asarray(target), options)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def chances(*shape: int) -> np.ndarray:
    return rng.uniform(0.01, 0.99, shape)


def classes(n: int, *shape: int) -> np.ndarray:
    return rng.integers(0, n, shape)


def some_ignored(n: int, *shape: int, ignored: int = -100) -> np.ndarray:
    target = classes(n, *shape)
    target.flat[::3] = ignored
    return target


def distributions(*shape: int, axis: int = 1) -> np.ndarray:
    weights = rng.exponential(size=shape)
    return weights / weights.sum(axis, keepdims=True)


def log_chances(*shape: int) -> np.ndarray:
    x = normal(*shape)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def class_losses(name: str, inputs: Callable[..., np.ndarray]) -> list[Case]:
    """What `cross_entropy` and `nll` share: class indices."""
    weight = np.array([0.5, 2.0, 0.0, 1.5])
    return [
        case(name, inputs(5, 4), classes(4, 5)),
        case(name, inputs(6, 4), some_ignored(4, 6)),
        case(name, inputs(6, 4), some_ignored(4, 6, ignored=2), ignore_index=2),
        case(name, inputs(6, 4), np.arange(6) % 4, weight=weight),
        case(name, inputs(6, 4), some_ignored(4, 6), weight=weight),
        case(name, inputs(2, 4, 3), some_ignored(4, 2, 3)),
        case(name, inputs(2, 4, 3), some_ignored(4, 2, 3), weight=weight),
        case(name, inputs(2, 3, 2, 4), classes(3, 2, 2, 4)),
        case(name, inputs(4), np.array(2)),  # one row without a batch axis
        case(name, inputs(2, 3, 5), some_ignored(5, 2, 3), axis=-1),
        case(name, inputs(2, 3, 4), classes(4, 2, 3), axis=-1, weight=weight),
        case(name, inputs(3, 2), classes(3, 2), axis=0),
        case(name, inputs(5, 4), classes(4, 5).astype(np.uint8)),
        case(name, inputs(5, 1), np.zeros(5, np.int64)),
        case(name, inputs(0, 4), np.zeros(0, np.int64)),
        # A float32 weight takes the input's dtype.
        case(name, inputs(6, 4), classes(4, 6), weight=weight.astype(np.float32)),
    ]


def numbers(name: str, *options: dict[str, Any]) -> list[Case]:
    """Losses of two tensors of one shape."""
    return [
        case(name, x, y, **o)
        for o in options or ({},)
        for x, y in (
            (normal(5), normal(5)),
            (normal(2, 3, 4), normal(2, 3, 4)),
            (normal(), normal()),
            (np.array([0.0, 1.0, -1.0, 1e6]), np.array([0.0, 0.0, -1.0, -1e6])),
            (normal(0, 3), normal(0, 3)),
        )
    ]


dense_weight = np.array([0.5, 2.0, 1.0, 1.5])

TABLE = [
    *numbers("mse"),
    *numbers("l1"),
    *numbers("huber", {}, {"delta": 0.3}, {"delta": 2}),
    case("huber", [0.5, -0.5, 0.5001], [0.0, 0.0, 0.0], delta=0.5),
    case("mse", normal(4), classes(3, 4)),  # integers become floats
    *(case(n, normal(3, 5), normal(3, 5), weight=chances(3, 5)) for n in ("mse", "l1", "huber")),
    *class_losses("cross_entropy", normal),
    case("cross_entropy", normal(5, 4), classes(4, 5), label_smoothing=0.1),
    case("cross_entropy", normal(6, 4), some_ignored(4, 6), label_smoothing=0.3),
    case("cross_entropy", normal(6, 4), some_ignored(4, 6), label_smoothing=0.3, weight=dense_weight),
    case("cross_entropy", normal(2, 4, 3), some_ignored(4, 2, 3), label_smoothing=1.0, weight=dense_weight),
    case("cross_entropy", normal(5, 4), distributions(5, 4)),
    case("cross_entropy", normal(5, 4), distributions(5, 4), weight=dense_weight, label_smoothing=0.2),
    case("cross_entropy", normal(2, 4, 3), distributions(2, 4, 3), label_smoothing=0.1),
    case("cross_entropy", normal(2, 4, 3, 2), distributions(2, 4, 3, 2), weight=dense_weight),
    case("cross_entropy", normal(4), distributions(4, axis=0)),
    case("cross_entropy", normal(2, 3, 4), distributions(2, 3, 4, axis=-1), axis=-1, weight=dense_weight),
    case("cross_entropy", normal(3, 4), distributions(3, 4).astype(np.float32)),
    case("cross_entropy", [[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, 1000.0]], [1, 2]),
    case("cross_entropy", [[1000.0, -1000.0, 0.0], [0.0, 0.0, 1000.0]], [2, 0], label_smoothing=0.1),
    case("cross_entropy", [[1000.0, -1000.0], [0.0, 1.0]], [[0.5, 0.5], [1.0, 0.0]]),
    case("cross_entropy", [[-math.inf, 0.0, 1.0], [0.0, -math.inf, 1.0]], [1, 2]),
    *class_losses("nll", log_chances),
    case("bce", chances(5), chances(5)),
    case("bce", chances(2, 3), classes(2, 2, 3)),
    case("bce", chances(2, 3), chances(2, 3), weight=np.array([0.5, 2.0, 0.0])),
    case("bce", chances(2, 3), chances(2, 3), weight=chances(2, 1)),
    case("bce", chances(), chances()),
    case("bce", [0.0, 1.0, 1e-11, 1 - 1e-11, 1e-11], [0.0, 1.0, 1.0, 0.0, 0.3]),
    case("bce_with_logits", normal(5), chances(5)),
    case("bce_with_logits", normal(2, 3), classes(2, 2, 3)),
    case("bce_with_logits", normal(2, 3), chances(2, 3), weight=np.array([0.5, 2.0, 0.0])),
    case("bce_with_logits", normal(2, 3), chances(2, 3), pos_weight=np.array([0.5, 2.0, 3.0])),
    case("bce_with_logits", normal(2, 3), chances(2, 3), pos_weight=np.array(4.0), weight=chances(2, 3)),
    case("bce_with_logits", normal(2, 3, 4, 2), chances(2, 3, 4, 2), pos_weight=chances(3, 1, 1)),
    case("bce_with_logits", [0.0, 1000.0, -1000.0, 1000.0, -1000.0], [0.5, 0.0, 1.0, 1.0, 0.0]),
    case("bce_with_logits", [0.0, 0.0, 1e-9], [0.0, 1.0, 1.0], pos_weight=np.array(3.0)),
    case("kl_div", log_chances(4, 3), distributions(4, 3)),
    case("kl_div", log_chances(4, 3), log_chances(4, 3), log_target=True),
    case("kl_div", log_chances(2, 3, 4), distributions(2, 3, 4, axis=-1)),
    case("kl_div", log_chances(5), distributions(5, axis=0)),
    case("kl_div", log_chances(2, 3), [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]),
    case("kl_div", log_chances(1, 3), [[-math.inf, 0.0, -1.0]], log_target=True),
]  # fmt: skip


def torch_classes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input, target, axis=None, **options):
        if axis is not None and input.ndim > 1:
            input = input.movedim(axis, 1)
            target = target.movedim(axis, 1) if target.is_floating_point() else target
        floating = target.is_floating_point()
        target = target.to(input.dtype) if floating else target.long()
        return function(input, target, **options)

    return call


def torch_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, target, **options: function(x, target.to(x.dtype), **options)


THEIRS = {
    "mse": torch_numbers(F.mse_loss),
    "l1": torch_numbers(F.l1_loss),
    "huber": torch_numbers(F.huber_loss),
    "cross_entropy": torch_classes(F.cross_entropy),
    "nll": torch_classes(F.nll_loss),
    "bce": torch_numbers(F.binary_cross_entropy),
    "bce_with_logits": torch_numbers(F.binary_cross_entropy_with_logits),
    "kl_div": torch_numbers(F.kl_div),
}


def numbered() -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for c in TABLE:
        counts[c.name] = counts.get(c.name, -1) + 1
        names.append(f"{c.name}-{counts[c.name]}")
    return names


CASES = [
    pytest.param(c, reduction, id=f"{i}-{reduction}")
    for c, i in zip(TABLE, numbered(), strict=True)
    for reduction in (*REDUCTIONS, *(["batchmean"] if c.name == "kl_div" else []))
]


def torch_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        n: torch.as_tensor(v, dtype=torch.float64) if isinstance(v, np.ndarray) else v
        for n, v in options.items()
    }


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    a, b = np.asarray(ours), np.asarray(theirs)
    assert a.shape == b.shape, what
    np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def test_every_loss_has_four_configurations() -> None:
    # test_more_losses.py has the other losses.
    for name in THEIRS:
        assert sum(c.name == name for c in TABLE) >= 4


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize(("c", "reduction"), CASES)
def test_values_and_gradients(c: Case, reduction: str) -> None:
    ours = getattr(losses, c.name)
    x = torch.tensor(c.input, requires_grad=True)
    theirs = THEIRS[c.name](
        x, torch.as_tensor(c.target), reduction=reduction, **torch_options(c.options)
    )
    result, pull = td.vjp(lambda x: ours(x, c.target, reduction=reduction, **c.options), c.input)
    assert result.dtype is td.float64
    assert_close(result.numpy(), theirs.detach().numpy(), "value")

    ct = np.random.default_rng(1).standard_normal(result.shape)
    (expected,) = torch.autograd.grad(theirs, x, torch.as_tensor(ct))
    (gradient,) = pull(ct)
    assert_close(gradient.numpy(), expected.numpy(), "gradient")


DENSE = [
    pytest.param(c, id=i)
    for c, i in zip(TABLE, numbered(), strict=True)
    if c.target.dtype == np.float64
    and c.name not in ("bce", "kl_div")  # torch's slope at a target of 0 is infinite
    and c.target.size
]


@pytest.mark.parametrize("c", DENSE)
def test_gradients_of_targets(c: Case) -> None:
    y = torch.tensor(c.target, requires_grad=True)
    theirs = THEIRS[c.name](torch.as_tensor(c.input), y, **torch_options(c.options))
    theirs.backward()
    gradient = td.grad(lambda y: getattr(losses, c.name)(c.input, y, **c.options))(c.target)
    assert_close(gradient.numpy(), y.grad.numpy(), "gradient of the target")


@pytest.mark.parametrize(("c", "reduction"), CASES)
def test_what_a_reduction_gives(c: Case, reduction: str) -> None:
    result = getattr(losses, c.name)(c.input, c.target, reduction=reduction, **c.options)
    assert isinstance(result, Mean if "mean" in reduction else td.Tensor)


@pytest.mark.parametrize("weight", [None, np.array([1.0, 2.0, 3.0])])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_all_targets_ignored(name: str, weight: np.ndarray | None) -> None:
    """A mean over nothing is NaN, as in PyTorch; a sum is 0, and so are all gradients."""
    x, y = normal(4, 3), np.full(4, -100)
    loss = getattr(losses, name)
    assert math.isnan(loss(x, y, weight).item())
    assert loss(x, y, weight, reduction="sum").item() == 0
    for reduction in ("mean", "sum"):
        gradient = td.grad(lambda x, r=reduction: loss(x, y, weight, reduction=r))(x)
        np.testing.assert_array_equal(gradient.numpy(), 0)


def test_weights_of_means() -> None:
    x, y = normal(4, 3), np.array([0, -100, 2, 1])
    assert losses.cross_entropy(x, y).weight.item() == 3
    assert losses.cross_entropy(x, y, np.array([0.5, 1.0, 4.0])).weight.item() == 5.5
    assert losses.cross_entropy(x, distributions(4, 3), np.ones(3) * 7).weight.item() == 4
    assert losses.nll(x, y).weight.item() == 3
    assert losses.mse(x, x).weight.item() == 12
    assert losses.kl_div(x, np.abs(x)).weight.item() == 12
    assert losses.kl_div(x, np.abs(x), reduction="batchmean").weight.item() == 4


def test_means_of_batches_combine() -> None:
    """Σ total / Σ weight of two parts is the mean of the whole."""
    x, y = normal(7, 3), np.array([0, -100, 2, 1, -100, -100, 0])
    parts = [losses.cross_entropy(x[s], y[s]) for s in (slice(0, 3), slice(3, 7))]
    total, weight = (sum(getattr(p, n).item() for p in parts) for n in ("total", "weight"))
    np.testing.assert_allclose(total / weight, losses.cross_entropy(x, y).item(), rtol=1e-14)


def test_losses_differentiate_twice() -> None:
    x, y = chances(5), chances(5)
    ours = td.grad(lambda x: td.grad(lambda x: losses.bce(x, y, reduction="sum"))(x).sum())(x)
    expected = y / x**2 + (1 - y) / (1 - x) ** 2
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-10)


def test_bce_of_probabilities_that_have_no_logarithm() -> None:
    """Values are at most 100; slopes are (x − y) / 1e-12, which torch has as a float32."""
    x = np.array([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1e-13, 1 - 1e-13, 1e-40])
    y = np.array([0.0, 1.0, 0.0, 1.0, 0.3, 0.3, 1.0, 0.0, 0.7])
    torch_x = torch.tensor(x, requires_grad=True)
    theirs = F.binary_cross_entropy(torch_x, torch.as_tensor(y), reduction="none")
    theirs.sum().backward()
    assert_close(losses.bce(x, y, reduction="none").numpy(), theirs.detach().numpy(), "value")
    gradient = td.grad(lambda x: losses.bce(x, y, reduction="sum"))(x).numpy()
    np.testing.assert_allclose(gradient, torch_x.grad.numpy(), rtol=1e-8)


def test_a_negative_target_of_kl_div_is_nan() -> None:
    assert math.isnan(losses.kl_div(np.array([-1.0]), np.array([-0.5]), "sum").item())


# td.Mean

a, b = td.tensor(normal(4)), td.tensor(normal(4))


def traced_terms(build: Callable[[td.Tensor], Mean]) -> int:
    """How many terms a mean has inside a trace."""
    found: list[int] = []

    def loss(x: td.Tensor) -> Mean:
        mean = build(x)
        found.append(len(mean.terms))
        return mean

    td.grad(loss)(normal(4))
    return found[0]


def test_a_mean_is_its_quotient() -> None:
    mean = td.Mean(6.0, 4)
    assert mean.item() == 1.5
    assert mean.tensor().item() == 1.5
    assert (mean.total.item(), mean.weight.item()) == (6, 4)
    assert repr(mean) == "Mean(tensor(6., float32[]) / tensor(4., float32[]))"


def test_an_integer_total_becomes_a_float() -> None:
    mean = td.Mean(td.tensor(6), td.tensor(4))
    assert mean.total.dtype is td.float32
    assert td.Mean(td.tensor(6.0, td.float64), 4).weight.dtype is td.float64


def test_a_mean_scaled_is_a_mean() -> None:
    mean = td.Mean(6.0, 4)
    for scaled in (mean * 2, 2 * mean, mean / 0.5, np.float32(2) * mean, mean * td.tensor(2.0)):
        assert isinstance(scaled, Mean)
        assert scaled.weight.item() == 4
        assert scaled.item() == 3
    assert (-mean).item() == -1.5


def test_means_of_one_weight_add_up_to_one_term() -> None:
    total = td.Mean(6.0, 4) + td.Mean(2.0, 4)
    assert len(total.terms) == 1
    assert (total.total.item(), total.weight.item()) == (8, 4)
    assert (td.Mean(6.0, 4) - td.Mean(2.0, 4)).item() == 1
    both = losses.mse(a, b) + 0.1 * losses.l1(a, b)
    assert len(both.terms) == 1
    expected = ((a - b) ** 2).mean().item() + 0.1 * td.abs(a - b).mean().item()
    np.testing.assert_allclose(both.item(), expected, rtol=1e-12)


def test_means_of_one_weight_add_up_in_a_trace() -> None:
    y, z = normal(4), normal(4)
    assert traced_terms(lambda x: losses.mse(x, y) + losses.l1(x, z)) == 1
    assert traced_terms(lambda x: losses.mse(x, y) + losses.mse(x[:2], y[:2])) == 2

    target = np.array([0, 1, -100, 1])

    def two_heads(x: td.Tensor) -> Mean:
        logits = td.stack([x, x * 2], 1)
        return losses.cross_entropy(logits, target) + losses.cross_entropy(-logits, target)

    assert traced_terms(two_heads) == 1


def test_differently_weighted_means_keep_their_terms() -> None:
    mean = td.Mean(6.0, 4) + td.Mean(2.0, 8)
    assert [(t.item(), w.item()) for t, w in mean.terms] == [(6, 4), (2, 8)]
    assert mean.item() == 1.75
    assert (mean * 2).item() == 3.5
    assert (mean / 2).item() == 0.875
    assert (mean + 1).item() == 2.75
    assert (mean + td.Mean(4.0, 8)).item() == 2.25
    assert len((mean + td.Mean(4.0, 8)).terms) == 2
    assert (mean - mean).item() == 0


def test_a_scalar_counts_once_per_unit_of_weight() -> None:
    mean = td.Mean(6.0, 4) + td.tensor(2.0)
    assert isinstance(mean, Mean)
    assert (mean.total.item(), mean.weight.item()) == (14, 4)
    assert mean.item() == 3.5
    assert (td.Mean(6.0, 4) + 2).item() == 3.5
    assert (2 + td.Mean(6.0, 4)).item() == 3.5
    assert (td.Mean(6.0, 4) - 2).item() == -0.5
    assert (2 - td.Mean(6.0, 4)).item() == 0.5
    assert isinstance(2 - td.Mean(6.0, 4), Mean)


def test_means_can_be_summed() -> None:
    means = [td.Mean(1.0, 4), td.Mean(2.0, 4), td.Mean(3.0, 4)]
    total = sum(means)
    assert isinstance(total, Mean)
    assert (total.total.item(), total.weight.item()) == (6, 4)


def test_a_mean_is_used_as_a_tensor() -> None:
    mean = td.Mean(8.0, 2)
    assert td.sqrt(mean).item() == 2
    assert (mean > 3).item()
    assert td.stack([mean, mean]).shape == (2,)
    x = normal(4)
    value, gradient = td.value_and_grad(lambda x: losses.mse(x, np.zeros(4)))(x)
    np.testing.assert_allclose(value.item(), (x**2).mean())
    np.testing.assert_allclose(gradient.numpy(), x / 2)


x53, y5 = td.zeros((5, 3)), td.zeros((5,), td.int32)
y4, f5 = td.zeros((4,), td.int32), td.zeros((5,))
i53 = td.zeros((5, 3), td.int32)
scalar = td.zeros(())

MISTAKES = [
    (lambda: td.Mean(f5, 1), td.ShapeError, "Mean", "total", "float32[5]", "Sum it"),
    (lambda: td.Mean(1.0, f5), td.ShapeError, "Mean", "weight", "float32[5]"),
    (lambda: td.Mean(1.0, 2) + f5, td.ShapeError, "Mean", "float32[5]"),
    (lambda: td.Mean(1.0, 2) * f5, td.ShapeError, "Mean", "float32[5]"),
    (lambda: losses.cross_entropy(x53, y4), td.ShapeError, "cross_entropy", "int32[4]", "(5,)", "axis=-1"),
    (lambda: losses.cross_entropy(x53, f5), td.ShapeError, "cross_entropy", "float32[5]", "integers"),
    (lambda: losses.cross_entropy(x53, td.zeros((3, 5))), td.ShapeError, "cross_entropy", "float32[3,5]"),
    (lambda: losses.cross_entropy(x53, y5 == 0), td.DTypeError, "cross_entropy", "bool[5]", "int32"),
    (lambda: losses.cross_entropy(i53, y5), td.DTypeError, "cross_entropy", "int32[5,3]", "float"),
    (lambda: losses.cross_entropy(scalar, y5), td.DTypeError, "cross_entropy", "float32[]"),
    (lambda: losses.cross_entropy(x53, y5, axis=2), td.AxisError, "cross_entropy", "axis 2"),
    (lambda: losses.cross_entropy(x53, y5, weight=f5), td.ShapeError, "cross_entropy", "float32[5]", "3 classes"),
    (lambda: losses.cross_entropy(x53, x53, weight=f5), td.ShapeError, "cross_entropy", "float32[5]"),
    (lambda: losses.cross_entropy(x53, x53, ignore_index=0), td.ArgumentError, "cross_entropy", "ignore_index = 0"),
    (lambda: losses.cross_entropy(x53, y5, label_smoothing=1.5), td.ArgumentError, "cross_entropy", "1.5"),
    (lambda: losses.cross_entropy(x53, y5, reduction="avg"), td.ArgumentError, "cross_entropy", "'avg'", '"mean"'),
    (lambda: losses.nll(x53, y4), td.ShapeError, "nll", "int32[4]", "(5,)"),
    (lambda: losses.nll(x53, x53), td.DTypeError, "nll", "float32[5,3]", "int32"),
    (lambda: losses.nll(x53, y5, weight=f5), td.ShapeError, "nll", "float32[5]", "3 classes"),
    (lambda: losses.nll(x53, y5, reduction="batchmean"), td.ArgumentError, "nll", "'batchmean'"),
    (lambda: losses.mse(x53, f5), td.ShapeError, "mse", "float32[5,3]", "float32[5]", "broadcast"),
    (lambda: losses.mse(y5, y5), td.DTypeError, "mse", "int32[5]", "Cast"),
    (lambda: losses.mse(f5, f5, reduction="none "), td.ArgumentError, "mse", "'none '"),
    (lambda: losses.l1(x53, f5), td.ShapeError, "l1", "float32[5]"),
    (lambda: losses.huber(x53, f5), td.ShapeError, "huber", "float32[5]"),
    (lambda: losses.huber(f5, f5, delta=0), td.ArgumentError, "huber", "delta = 0", "positive"),
    (lambda: losses.bce(x53, f5), td.ShapeError, "bce", "float32[5]"),
    (lambda: losses.bce(f5, f5, weight=x53), td.ShapeError, "bce", "weight float32[5,3]", "float32[5]"),
    (lambda: losses.bce(f5, f5, weight=td.ones((3,))), td.ShapeError, "bce", "weight float32[3]"),
    (lambda: losses.bce_with_logits(x53, f5), td.ShapeError, "bce_with_logits", "float32[5]"),
    (lambda: losses.bce_with_logits(x53, x53, pos_weight=f5), td.ShapeError, "bce_with_logits", "pos_weight"),
    (lambda: losses.bce_with_logits(x53, x53, weight=f5), td.ShapeError, "bce_with_logits", "weight"),
    (lambda: losses.kl_div(x53, f5), td.ShapeError, "kl_div", "float32[5]"),
    (lambda: losses.kl_div(scalar, scalar, reduction="batchmean"), td.ShapeError, "kl_div", "batch axis"),
    (lambda: losses.kl_div(f5, f5, reduction="max"), td.ArgumentError, "kl_div", "'max'"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: f"{m[2]}-{m[0].__code__.co_firstlineno}"
)
def test_mistakes(mistake: tuple) -> None:
    refused(*mistake)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_class_that_does_not_exist(wrong: int) -> None:
    with pytest.raises(td.IndexRangeError, match=f"index {wrong} .* 3 elements"):
        losses.cross_entropy(x53, td.tensor([0, 1, 2, wrong, 0]))


def test_a_mean_on_the_right_keeps_its_weight() -> None:
    mean = td.Mean(td.tensor(6.0), td.tensor(3.0))
    for result in (td.tensor(2.0) * mean, td.tensor(1.0) + mean, 1 + mean, td.tensor(1.0) - mean):
        assert isinstance(result, td.Mean)
        assert result.weight.item() == 3.0
    assert (td.tensor(1.0) - mean).item() == -1.0
    assert float(mean) == 2.0
