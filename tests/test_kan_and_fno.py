"""KAN beside a PyTorch program, FNO beside figures of `neuraloperator`; both learn."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from treadle import models, optim
from treadle.models.kan import even_knots, spline_bases


class TorchKANLinear(torch.nn.Module):
    """A layer of efficient-kan, as its author wrote it but for what grids are updated with."""

    def __init__(self, inputs: int, outputs: int, grid_size: int = 5, order: int = 3):
        super().__init__()
        h, self.order = 2 / grid_size, order
        grid = (torch.arange(-order, grid_size + order + 1) * h - 1).expand(inputs, -1)
        self.register_buffer("grid", grid.contiguous())
        self.base_weight = torch.nn.Parameter(torch.randn(outputs, inputs))
        self.spline_weight = torch.nn.Parameter(torch.randn(outputs, inputs, grid_size + order))
        self.spline_scaler = torch.nn.Parameter(torch.randn(outputs, inputs))

    def bases(self, x: torch.Tensor) -> torch.Tensor:
        grid, x = self.grid, x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)])
            bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
        return bases

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = torch.nn.functional.linear(torch.nn.functional.silu(x), self.base_weight)
        weight = self.spline_weight * self.spline_scaler.unsqueeze(-1)
        flat = self.bases(x).flatten(1)
        return base + torch.nn.functional.linear(flat, weight.flatten(1))


class TorchKAN(torch.nn.Module):
    def __init__(self, sizes: list[int], **settings: int):
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = torch.nn.ModuleList(TorchKANLinear(a, b, **settings) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ROWS = np.random.default_rng(0).uniform(-1.2, 1.2, (33, 3)).astype(np.float32)


def test_kan_is_pytorchs() -> None:
    torch.manual_seed(0)
    for settings in ({}, {"grid_size": 4, "spline_order": 2}):
        order = settings.get("spline_order", 3)
        twin = TorchKAN([3, 4, 2], grid_size=settings.get("grid_size", 5), order=order)
        model = models.KAN(models.KANConfig(sizes=(3, 4, 2), **settings))
        model.start_from(twin.state_dict())
        given = torch.tensor(ROWS, requires_grad=True)
        theirs = twin(given)
        found = model.apply(model.values(), ROWS)
        assert np.abs(found.numpy() - theirs.detach().numpy()).max() < 1e-4
        (theirs**2).mean().backward()

        def total(values: dict[str, td.Tensor], model: Any = model) -> td.Tensor:
            return (model.apply(values, ROWS) ** 2).mean()

        gradients = td.grad(total)(model.values())
        for name, parameter in twin.named_parameters():
            wanted = parameter.grad.numpy()
            error = np.abs(gradients[name].numpy() - wanted).max()
            assert error < 1e-4 * (1 + np.abs(wanted).max()), name


def test_splines_are_a_partition_of_one() -> None:
    """Their sum is 1 between the ends of the grid, for tensors and arrays."""
    config = models.KANConfig(grid_size=7, spline_order=4)
    grid = even_knots(config, 2).astype(np.float64)
    x = np.random.default_rng(1).uniform(-1, 1, (50, 2))
    bases = spline_bases(x, grid, 4)
    assert bases.shape == (50, 2, 11)
    assert np.allclose(bases.sum(-1), 1)
    assert (bases >= 0).all()
    same = spline_bases(td.tensor(x), td.tensor(grid), 4)
    assert np.allclose(same.numpy(), bases)


def test_grids_follow_their_inputs() -> None:
    """The function stays where the inputs are, and knots go there."""
    model = models.KAN(models.KANConfig(sizes=(2, 3, 1), grid_size=12))
    values = {n: np.array(v) for n, v in model.init(0).items()}
    for i in range(2):  # something to be seen
        name = f"layers.{i}.spline_weight"
        values[name] = np.random.default_rng(i).normal(size=values[name].shape).astype(np.float32)
    x = np.random.default_rng(2).uniform(-0.4, 0.3, (400, 2)).astype(np.float32)
    moved = model.with_moved_grids(values, x)
    ends = moved["layers.0.grid"][:, [3, -4]]
    assert np.abs(ends - [x.min(), x.max()]).max() < 0.05
    before, after = (model.apply(v, x).numpy() for v in (values, moved))
    assert np.abs(after - before).max() < 0.05 * np.abs(before).max()
    with pytest.raises(td.ShapeError, match="rows for 15 splines"):
        model.with_moved_grids(values, x[:15])


def test_regularization_is_that_of_the_formula() -> None:
    model = models.KAN([2, 3])
    values = model.init(0)

    def penalty(model: models.KAN, x: Any) -> td.Tensor:
        return model.regularization_loss(2.0, 3.0)

    found = td.compile_forward(model, penalty, td.Spec((1,)), device="oracle")(np.zeros(1))
    sizes = np.abs(values["layers.0.spline_weight"]).mean(-1)
    share = sizes / sizes.sum()
    assert np.isclose(found, 2 * sizes.sum() - 3 * (share * np.log(share)).sum(), rtol=1e-5)


@pytest.mark.slow  # as in docs/models.md
def test_kan_learns_a_product() -> None:
    model = models.KAN(models.KANConfig(sizes=(2, 4, 1), grid_size=4))
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (256, 2)).astype(np.float32)
    y = x[:, :1] * x[:, 1:]

    def loss(model: Any, batch: dict[str, td.Tensor]) -> td.Tensor:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    spec = {"x": td.Spec(x.shape), "y": td.Spec(y.shape)}
    step = td.compile_step(model, loss, optim.adam(2e-2), spec, device="cpu")
    history = [float(step({"x": x, "y": y}).loss) for _ in range(250)]
    assert history[-1] < 0.02 * history[0]


FNOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plane": ({"n_modes": (6, 5), "in_channels": 2, "out_channels": 3}, (2, 2, 12, 10)),
    "coarse": ({"n_modes": (6, 5), "in_channels": 2, "out_channels": 3}, (2, 2, 4, 6)),
    "line": (
        {
            "n_modes": (6,),
            "in_channels": 2,
            "norm": "group_norm",
            "fno_skip": "soft-gating",
            "channel_mlp_skip": "linear",
        },
        (2, 2, 13),
    ),
    "space": (
        {
            "n_modes": (4, 3, 6),
            "use_channel_mlp": False,
            "positional_embedding": None,
            "lifting_channel_ratio": 0,
        },
        (2, 1, 8, 6, 9),
    ),
}
OPERATOR = {"in_channels": 1, "out_channels": 1, "hidden_channels": 6, "n_layers": 2}
FIGURES: dict[str, tuple[float, float]] = {  # of neuraloperator 2.0.0
    "plane": (-10.736832, -2.886951),
    "coarse": (-1.878236, 2.094467),
    "line": (0.050101, 0.034558),
    "space": (11.123777, 2.722267),
}


def value_for(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.normal(size=shape) * 0.3).astype(np.float32)


def inputs(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def figures(found: np.ndarray) -> tuple[float, float]:
    weights = np.random.default_rng(1).normal(size=(2, found.size))
    a, b = weights @ found.reshape(-1).astype(np.float64)
    return float(a), float(b)


@pytest.mark.parametrize("name", FNOS)
def test_fno_gives_neuraloperators_figures(name: str) -> None:
    settings, shape = FNOS[name]
    model = models.FNO(models.FNOConfig(**{**OPERATOR, **settings}))
    values = {n: value_for(n, d.shape) for n, d in model.declarations().items()}
    found = model.apply(values, inputs(shape)).numpy()
    assert np.allclose(figures(found), FIGURES[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FNOS)
def test_figures_are_neuraloperators(name: str) -> None:
    library = pytest.importorskip("neuralop.models")
    settings, shape = FNOS[name]
    twin = library.FNO(**{**OPERATOR, **settings})
    values = {}
    for key, value in twin.state_dict().items():
        if key != "_metadata":
            size = tuple(value.shape) + ((2,) if value.is_complex() else ())
            values[key] = torch.tensor(value_for(key, size))
            if value.is_complex():
                values[key] = torch.view_as_complex(values[key])
    torch.nn.Module.load_state_dict(twin, values)
    with torch.no_grad():
        found = twin(torch.tensor(inputs(shape))).numpy()
    assert np.allclose(figures(found), FIGURES[name], rtol=1e-4, atol=1e-5)
    model = models.FNO(models.FNOConfig(**{**OPERATOR, **settings}))
    model.device = "cpu"
    model.start_from(values)  # complex values as they are
    assert np.abs(model(inputs(shape)) - found).max() < 1e-4

    def total(values: dict[str, td.Tensor]) -> td.Tensor:
        return (model.apply(values, inputs(shape)) ** 2).mean()

    gradients = td.grad(total)(model.values())
    (twin(torch.tensor(inputs(shape))) ** 2).mean().backward()
    for key, parameter in twin.named_parameters():
        wanted = parameter.grad
        wanted = torch.view_as_real(wanted) if wanted.is_complex() else wanted
        error = np.abs(gradients[key].numpy() - wanted.numpy()).max()
        assert error < 1e-4 * (1 + float(wanted.abs().max())), key


def test_fno_learns_a_derivative_and_keeps_it_on_another_grid() -> None:
    def waves(count: int, points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        t = np.arange(points) / points * 2 * np.pi
        k = np.arange(1, 4)[:, None]
        a, b = rng.normal(size=(2, count, 3))
        x = a @ np.sin(k * t) + b @ np.cos(k * t)
        y = (a * k[:, 0]) @ np.cos(k * t) - (b * k[:, 0]) @ np.sin(k * t)
        return x[:, None].astype(np.float32), y[:, None].astype(np.float32) / 3

    settings = {"n_modes": (8,), "hidden_channels": 12, "n_layers": 1}
    model = models.FNO(models.FNOConfig(**settings, positional_embedding=None))

    def loss(model: Any, batch: dict[str, td.Tensor]) -> td.Tensor:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    x, y = waves(32, 24, 0)
    spec = {"x": td.Spec(x.shape), "y": td.Spec(y.shape)}
    step = td.compile_step(model, loss, optim.adam(1e-2), spec, device="cpu")
    for i in range(250):
        x, y = waves(32, 24, i)
        step({"x": x, "y": y})
    model.device = "oracle"
    model.start_from(step.params)
    for points in (24, 40):
        x, y = waves(16, points, 999)
        assert ((model(x) - y) ** 2).mean() < 0.03 * (y**2).mean()


def test_wrong_use() -> None:
    for call, message in (
        (lambda: models.KANConfig(sizes=(3,)), "at least two"),
        (lambda: models.KANConfig(grid_range=(1.0, -1.0)), "grid_range"),
        (lambda: models.KAN([2, 1]).apply(models.KAN([2, 1]).init(0), np.zeros((1, 3))), "2"),
        (lambda: models.FNOConfig(n_modes=()), "n_modes"),
        (lambda: models.FNOConfig(fno_skip="none"), "fno_skip"),
        (lambda: models.FNOConfig(norm="ada_in"), "group_norm"),
    ):
        with pytest.raises(td.TreadleError, match=message):
            call()
