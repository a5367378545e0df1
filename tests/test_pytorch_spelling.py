"""What PyTorch users type by habit: `dim=`, `keepdim=`, sizes and methods, the same on both sides."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from treadle import losses, nn, optim
from treadle.base import elsewhere

# Of x, (2, 3, 4), and of y, a list of integers along the last axis.
EXPRESSIONS = """
x.sum(dim=1)
x.sum(dim=(0, 2), keepdim=True)
x.mean(dim=-1, keepdim=True)
x.var(dim=1)
x.std(dim=-1, keepdim=True)
x.amax(dim=1)
x.argmax(dim=2)
x.logsumexp(dim=0)
x.norm(dim=1)
x.softmax(dim=1)
x.cumsum(dim=2)
x.sort(dim=1)[0]
x.topk(2, dim=1)[0]
x.gather(dim=2, index=y)
x.unsqueeze(dim=0)
x.chunk(2, dim=2)[1]
x.split(1, dim=1)[2]
x.flip(dims=(0, 2))
x.roll(shifts=1, dims=2)
x.flatten(start_dim=1)
x.flatten(end_dim=1)
x.transpose(dim0=0, dim1=2)
x.repeat_interleave(2, dim=1)
x.expand(5, -1, -1, 4)
x[:, :1].expand(-1, 3, -1)
x.unbind(1)[2]
x.unbind(dim=-1)[0]
x.unflatten(2, (2, -1))
x.tile(2)
x.tile((2, 1, 1, 3))
x.swapaxes(0, 2)
x.movedim(0, 2)
x.clip(-1, 1)
x.clone()
x.where(x > 0, 0.0)
x[0].expand_as(x)
x.view_as(x.flip(0))
x.type_as(x)
x.mT
""".split("\n")[1:-1]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_methods_are_those_of_pytorch(expression: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 4)), rng.integers(0, 4, (2, 3, 2))
    expected = eval(expression, {"x": torch.tensor(x), "y": torch.tensor(y)})
    found = eval(expression, {"x": td.tensor(x), "y": td.tensor(y)})
    assert found.shape == tuple(expected.shape)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)


def test_sizes() -> None:
    x = td.zeros((2, 3, 4))
    assert (x.size, x.size(), x.size(1), x.size(-1)) == (24, (2, 3, 4), 3, 4)
    assert (x.numel(), x.dim(), x[0, 0].tolist()) == (24, 3, [0.0] * 4)
    refused(lambda: x.size(3), td.AxisError, "size", "axis 3")


def test_functions_take_dim_too() -> None:
    x = td.ones((2, 3))
    assert td.concat([x, x], dim=1).shape == (2, 6)
    assert td.stack([x, x], dim=-1).shape == (2, 3, 2)
    assert td.compile(lambda x: td.softmax(x, dim=0).sum(dim=0), x)(x.numpy()).tolist() == [1] * 3
    refused(lambda: td.sum(x, axis=0, dim=1), td.ArgumentError, "sum", "dim and axis")


def test_an_expanded_size_that_is_not_there() -> None:
    refused(lambda: td.ones((3,)).expand(-1, 3), td.ShapeError, "expand", "(-1, 3)")


def test_a_parameter_may_be_given_by_its_values() -> None:
    first = np.arange(6.0).reshape(2, 3)
    model = {"a": nn.Parameter(first), "b": nn.Parameter(td.tensor(first[0]))}
    forward = td.compile_forward(model, lambda m, x: m["a"] @ m["b"] + x, np.zeros(2))
    np.testing.assert_array_equal(forward(np.ones(2)), first @ first[0] + 1)
    assert nn.Parameter(np.array([4, 5])).shape == (4, 5)


class Broken(nn.Module):
    @property
    def width(self) -> int:
        return self.misspelt


@pytest.mark.parametrize(
    ("call", "operation", "fragment"),
    [
        (lambda: td.cat([1.0]), "treadle", "td.concat"),
        (lambda: td.no_grad(), "treadle", "step.evaluate"),
        (lambda: td.conact([1.0]), "treadle", "Is it concat?"),
        (lambda: td.smooth_l1_loss, "treadle", "td.losses.smooth_l1"),
        (lambda: td.inverse, "treadle", "td.linalg.inv"),
        (lambda: td.gumbel_softmax, "treadle", "td.random.gumbel_softmax"),
        (lambda: nn.CrossEntropyLoss(), "nn", "losses.cross_entropy"),
        (lambda: nn.HuberLoss(), "nn", "losses.huber"),
        (lambda: nn.functional.relu, "nn", "td.relu"),
        (lambda: optim.Adam, "optim", "It is adam."),
        (lambda: optim.lr_scheduler, "optim", "optim.cosine"),
        (lambda: losses.mse_loss, "losses", "It is mse."),
        (lambda: td.zeros(()).backward(), "Tensor", "td.compile_step"),
        (lambda: td.zeros((2, 3)).max(dim=1).values, "Tensor", "argmax"),
        (lambda: td.zeros(()).add_(1), "add_", "x = x.add(...)"),
        (lambda: nn.Linear(2, 3).state_dict(), "Linear", "step.params"),
        (lambda: nn.Linear(2, 3).to("cpu"), "Linear", "device="),
    ],
)
def test_names_of_pytorch_lead_somewhere(call, operation: str, fragment: str) -> None:
    refused(call, td.UnknownNameError, operation, fragment)


def test_what_hints_name_is_there() -> None:
    """`td.` and `nn.` and names with dots after them, wherever a remedy says them."""
    tables = (elsewhere.TREADLE, elsewhere.NN, elsewhere.OPTIM, elsewhere.TENSOR, elsewhere.MODULE)
    for name, remedy in (pair for table in tables for pair in table.items()):
        for path in re.findall(r"\b(?:td|nn|losses|optim)(?:\.[A-Za-z_]\w*)+", remedy):
            first, *others = path.split(".")
            found = {"td": td, "nn": nn, "losses": losses, "optim": optim}[first]
            for other in others:
                assert hasattr(found, other), f"{name}: {remedy}"
                found = getattr(found, other)


def test_other_names_are_missing_as_always() -> None:
    for thing in (td, nn, td.zeros(()), nn.Linear(2, 3)):
        with pytest.raises(AttributeError, match="has no attribute 'quux_of'"):
            thing.quux_of  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'misspelt'"):
        Broken().width  # noqa: B018
