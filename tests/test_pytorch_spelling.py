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
x.norm()
x.norm(1)
x.norm(2, dim=1)
x.norm(p=3, dim=(0, 2), keepdim=True)
x.norm(float("-inf"), dim=2)
x.norm(0)
x.add(x, alpha=2)
x.sub(x, alpha=0.5)
x.div(x.flip(0), rounding_mode="floor")
x.div(x.flip(0), rounding_mode="trunc")
(y - 2).div(2, rounding_mode="trunc")
y.add(y, alpha=3)
x.sort(dim=1, stable=True)[0]
x.topk(2, dim=1, sorted=True)[0]
x.diagonal(dim1=0, dim2=2)
x.roll(3)
x.roll((1, 2), (0, 2))
x.roll(shifts=(1, 2), dims=(0, 2))
x.movedim((0, 1), (1, 2))
x.var(False)
x.var(unbiased=False)
x.std(dim=1, unbiased=False)
x.round(decimals=2)
x.round(decimals=-1)
x.max(x.flip(0))
x.sum(dim=1, dtype=x.dtype)
x.masked_fill(x > 0, 2)
(y > 1).masked_fill(y > 1, 3)
(y > 1).maximum(y > 2)
(y > 1).sum(0)
y.prod(dim=2)
y.cumsum(dim=1)
y.pow(7)
y ** y
(y - 2) ** (y - 2)
y.floor()
""".split("\n")[1:-1]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_methods_are_those_of_pytorch(expression: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 4)), rng.integers(0, 4, (2, 3, 2))
    expected = eval(expression, {"x": torch.tensor(x), "y": torch.tensor(y)})
    found = eval(expression, {"x": td.tensor(x), "y": td.tensor(y)})
    assert found.shape == tuple(expected.shape)
    if not expected.is_floating_point() and "argmax" not in expression:  # int32 indices
        assert str(expected.dtype).removeprefix("torch.") == found.dtype.name
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


def test_arguments_of_pytorch_that_have_no_meaning_here_are_answered() -> None:
    x = td.ones((2, 3))
    refused(lambda: td.zeros((2,), device="cpu"), td.ArgumentError, "zeros", "device", "td.compile")
    refused(lambda: x.sum(out=x), td.ArgumentError, "sum", "out", "never change")
    refused(lambda: x.long(memory_format=1), td.ArgumentError, "int64", "memory_format", "layouts")
    refused(lambda: x.sum(axes=1), td.ArgumentError, "sum", "axes", "keepdims")
    refused(
        lambda: td.topk(x, 1, -1, True, True, 5), td.ArgumentError, "topk", "positional", "largest"
    )
    refused(lambda: td.cumsum(x), td.ArgumentError, "cumsum", "axis")
    refused(lambda: x.norm("nuc"), td.ArgumentError, "norm", "nuc", "matrix_norm")
    refused(lambda: td.add(td.tensor([1]), 2, alpha=0.5), td.DTypeError, "add", "alpha")


def test_one_axis_of_a_scalar_is_none() -> None:
    """PyTorch reduces a scalar along axis 0 or −1."""
    x = td.tensor(2.5)
    assert [td.sum(x, 0).item(), td.max(x, -1).item(), td.mean(x, 0, True).shape] == [2.5, 2.5, ()]
    assert td.argmax(x, 0).item() == 0


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [2, 5])
def test_images_of_bytes_are_resized_as_pytorch_does(mode: str, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, channels, 9, 6)).astype(np.uint8)
    settings: list[dict[str, object]] = [
        {"size": (5, 7)},
        {"size": (5, 7), "align_corners": True},
        {"scale_factor": 1.7},
        {"scale_factor": 0.6},
        {"size": (18, 12)},
    ]
    for given in settings:
        expected = torch.nn.functional.interpolate(torch.tensor(image), mode=mode, **given).numpy()
        found = td.interpolate(image, mode=mode, **given)
        assert found.dtype is td.uint8
        np.testing.assert_array_equal(found.numpy(), expected)
        program = td.compile(
            lambda x, given=given: td.interpolate(x, mode=mode, **given),
            td.Spec(image.shape, "uint8"),
        )
        np.testing.assert_array_equal(program(image), expected)


def test_means_of_integers_are_refused_as_in_pytorch() -> None:
    line = td.ones((1, 1, 5), td.uint8)
    image = td.ones((1, 1, 5, 5), td.uint8)
    for mode in ("linear", "area"):
        refused(
            lambda mode=mode: td.interpolate(line, 3, mode=mode),
            td.DTypeError,
            "interpolate",
            "uint8",
        )
    ints = image.astype(td.int32)
    refused(lambda: td.interpolate(ints, 3, mode="bilinear"), td.DTypeError, "interpolate", "int32")
    refused(lambda: td.adaptive_avg_pool(image, 2), td.DTypeError, "adaptive_avg_pool", "uint8")
    refused(lambda: td.avg_pool(image, 2), td.DTypeError, "avg_pool", "uint8")
    theta = td.ones((1, 2, 3), td.int32)
    refused(lambda: td.affine_grid(theta, (1, 1, 2, 2)), td.DTypeError, "affine_grid", "int32")
    grid = td.zeros((1, 2, 2, 2), td.int32)
    refused(lambda: td.grid_sample(ints, grid), td.DTypeError, "grid_sample", "int32")


def test_transforms_take_one_axis_and_one_size() -> None:
    x = td.tensor(np.random.default_rng(0).normal(size=(3, 4)))
    expected = torch.fft.rfftn(torch.tensor(x.numpy()), s=(6,), dim=(-1,))
    np.testing.assert_allclose(
        td.fft.rfftn(x, 6, -1).numpy(), torch.view_as_real(expected).numpy(), atol=1e-12
    )


def test_gradients_of_empty_tensors_compile() -> None:
    program = td.compile(td.grad(lambda x: td.lgamma(x).sum()), td.Spec((1, 0, 3)), device="cpu")
    assert program(np.zeros((1, 0, 3), np.float32)).shape == (1, 0, 3)


def test_convolutions_take_one_image() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 7, 6)), rng.normal(size=(2, 4, 3, 3))
    theirs = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(w), padding=1)
    np.testing.assert_allclose(td.conv(x, w, padding=1).numpy(), theirs.numpy(), atol=1e-12)
    theirs = torch.nn.functional.conv_transpose2d(torch.tensor(x), torch.tensor(w.swapaxes(0, 1)))
    found = td.conv_transpose(x, w.swapaxes(0, 1)).numpy()
    np.testing.assert_allclose(found, theirs.numpy(), atol=1e-12)
