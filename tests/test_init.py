"""First values: every initialiser and every layer's defaults against PyTorch's distributions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

import treadle as td
from layer_rows import ROWS
from refusals import refused
from test_layers import TABLE as LAYER_TABLE
from treadle import nn
from treadle.nn import init

LARGE = (300, 400)
IMAGE = (64, 32, 5, 7)


class Case(NamedTuple):
    name: str
    ours: init.Init
    theirs: Callable[[torch.Tensor], Any]
    shape: tuple[int, ...] = LARGE


TABLE = [
    Case("zeros", init.zeros, torch.nn.init.zeros_),
    Case("ones", init.ones, torch.nn.init.ones_),
    Case("constant", init.constant(-0.3), lambda t: torch.nn.init.constant_(t, -0.3)),
    Case("normal", init.normal(), torch.nn.init.normal_),
    Case("normal", init.normal(2.0, 0.1), lambda t: torch.nn.init.normal_(t, 2.0, 0.1)),
    Case("normal", init.normal(3.0, 0.0), lambda t: torch.nn.init.normal_(t, 3.0, 0.0)),
    Case("uniform", init.uniform(), torch.nn.init.uniform_),
    Case("uniform", init.uniform(-3, 5), lambda t: torch.nn.init.uniform_(t, -3, 5)),
    Case("truncated_normal", init.truncated_normal(), torch.nn.init.trunc_normal_),
    Case(
        "truncated_normal",
        init.truncated_normal(1.0, 2.0, -1.0, 4.0),
        lambda t: torch.nn.init.trunc_normal_(t, 1.0, 2.0, -1.0, 4.0),
    ),
    Case(
        "truncated_normal",  # bounds are values, so these cut nothing
        init.truncated_normal(std=0.02),
        lambda t: torch.nn.init.trunc_normal_(t, std=0.02),
    ),
    Case("xavier_uniform", init.xavier_uniform(), torch.nn.init.xavier_uniform_),
    Case("xavier_uniform", init.xavier_uniform(3.0), lambda t: torch.nn.init.xavier_uniform_(t, 3.0)),
    Case("xavier_uniform", init.xavier_uniform(), torch.nn.init.xavier_uniform_, IMAGE),
    Case("xavier_normal", init.xavier_normal(), torch.nn.init.xavier_normal_),
    Case("xavier_normal", init.xavier_normal(0.5), lambda t: torch.nn.init.xavier_normal_(t, 0.5), IMAGE),
    *(
        Case(
            f"kaiming_{kind}",
            getattr(init, f"kaiming_{kind}")(**options),
            lambda t, kind=kind, options=options: getattr(torch.nn.init, f"kaiming_{kind}_")(t, **options),
            shape,
        )
        for kind in ("uniform", "normal")
        for options, shape in (
            ({}, LARGE),
            ({"a": math.sqrt(5)}, LARGE),
            ({"mode": "fan_out", "nonlinearity": "relu"}, IMAGE),
            ({"nonlinearity": "tanh"}, IMAGE),
        )
    ),
    Case("orthogonal", init.orthogonal(), torch.nn.init.orthogonal_),
    Case("orthogonal", init.orthogonal(2.0), lambda t: torch.nn.init.orthogonal_(t, 2.0), (64, 8, 3, 3)),
]  # fmt: skip

# Not distributions, and tested by themselves below.
OTHERS = {"literal", "stream", "fans", "gain"}


def assert_same_distribution(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    """Two samples of one distribution: each difference within its sampling error."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (ours, theirs))
    assert a.size == b.size, what
    if np.ptp(b) == 0:
        np.testing.assert_array_equal(ours, theirs, err_msg=what)
        return
    n, std = a.size, b.std()
    # Six standard errors of a difference; a standard deviation's is at most a normal's.
    assert abs(a.mean() - b.mean()) < 6 * std * math.sqrt(2 / n), what
    assert abs(a.std() - std) < 6 * std * math.sqrt(1 / n), what
    # Extremes of n values lie about std / √(2 log n) apart for a normal, much less if bounded.
    for edge in (np.min, np.max):
        assert abs(edge(a) - edge(b)) < 6 * std / math.sqrt(2 * math.log(n)), what
    assert stats.ks_2samp(a, b).pvalue > 1e-4, what


def test_every_initialiser_is_in_the_table() -> None:
    public = {
        name
        for name, f in vars(init).items()
        if inspect.isfunction(f) and f.__module__ == init.__name__ and not name.startswith("_")
    }
    assert public == {c.name for c in TABLE} | OTHERS


@pytest.mark.parametrize("c", TABLE, ids=[f"{c.name}-{i}" for i, c in enumerate(TABLE)])
def test_distribution(c: Case) -> None:
    torch.manual_seed(0)
    theirs = torch.empty(c.shape, dtype=torch.float64)
    c.theirs(theirs)
    ours = c.ours(c.shape, init.stream(0, "weight"))
    assert ours.shape == c.shape
    assert_same_distribution(ours, theirs.numpy(), c.name)


def bounded(make: init.Init, shape: tuple[int, ...] = LARGE) -> tuple[float, float]:
    values = make(shape, init.stream(1, "w"))
    return float(values.min()), float(values.max())


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (init.uniform(-3, 5), -3, 5),
        (init.truncated_normal(), -2, 2),
        (init.truncated_normal(0.0, 1.0, 0.0, 0.5), 0.0, 0.5),
        (init.xavier_uniform(2.0), -2 * math.sqrt(6 / 700), 2 * math.sqrt(6 / 700)),
        (init.kaiming_uniform(), -math.sqrt(6 / 400), math.sqrt(6 / 400)),
        (init.kaiming_uniform(mode="fan_out"), -math.sqrt(6 / 300), math.sqrt(6 / 300)),
    ],
)
def test_bounds_are_kept_and_reached(make: init.Init, low: float, high: float) -> None:
    found = bounded(make)
    near = (high - low) * 1e-3  # 120 000 values come much nearer
    assert low <= found[0] < low + near
    assert high - near < found[1] <= high


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((8, 8), True), ((5, 9), True), ((9, 5), False), ((4, 3, 2, 2), True), ((12, 2, 2), False)],
)
def test_orthogonal(shape: tuple[int, ...], rows: bool) -> None:
    w = init.orthogonal(1.5)(shape, init.stream(0, "w")).reshape(shape[0], -1)
    product = w @ w.T if rows else w.T @ w
    np.testing.assert_allclose(product, 2.25 * np.eye(len(product)), atol=1e-12)


def test_orthogonal_is_uniform() -> None:
    """A plain QR factor is not: among others its determinants would not be as often −1 as 1."""
    make, n = init.orthogonal(), 2000
    drawn = np.stack([make((3, 3), init.stream(seed, "w")) for seed in range(n)])
    assert abs((np.linalg.det(drawn) > 0).mean() - 0.5) < 6 * 0.5 / math.sqrt(n)
    # Each entry is a coordinate of a point on the sphere: uniform in [−1, 1] in three dimensions.
    for entry in drawn.reshape(n, -1).T:
        assert stats.kstest(entry, stats.uniform(-1, 2).cdf).pvalue > 1e-4


def test_literal() -> None:
    array = np.arange(6.0).reshape(2, 3)
    make = init.literal(array)
    array[:] = 0  # it keeps a copy
    first = make((2, 3), init.stream(0, "w"))
    np.testing.assert_array_equal(first, np.arange(6.0).reshape(2, 3))
    first[:] = 9  # and gives copies
    assert make((2, 3), init.stream(0, "w"))[0, 0] == 0
    parameter = nn.Parameter((2,), init.literal([1, 2]))
    assert parameter.first_value(0, "w").dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 4), (5, 2, 3), (4, 3, 2, 5), (2, 1, 3, 3, 3), (1, 1)])
def test_fans(shape: tuple[int, ...]) -> None:
    assert init.fans(shape) == torch.nn.init._calculate_fan_in_and_fan_out(torch.empty(shape))


@pytest.mark.parametrize("name", ["linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu"])
def test_gain(name: str) -> None:
    assert init.gain(name) == pytest.approx(torch.nn.init.calculate_gain(name), rel=1e-15)
    assert init.gain("leaky_relu", 0.3) == torch.nn.init.calculate_gain("leaky_relu", 0.3)


LAYERS: list[tuple[str, tuple, dict[str, Any]]] = [
    ("Linear", (400, 300), {}),
    ("Linear", (4, 50_000), {}),
    ("Embedding", (500, 100), {}),
    ("LayerNorm", (1000,), {}),
    ("RMSNorm", (1000,), {}),
    ("Conv1d", (30, 2000, 5), {}),
    ("Conv2d", (30, 2000, (3, 2)), {"groups": 2}),
    ("Conv3d", (5, 2000, 3), {}),
    ("BatchNorm1d", (1000,), {}),
    ("BatchNorm2d", (1000,), {}),
    ("MultiHeadAttention", (200, 4), {}),
    ("MultiheadAttention", (200, 4), {"kdim": 100, "vdim": 50}),
    ("BatchNorm3d", (1000,), {}),
    ("GroupNorm", (4, 1000), {}),
    ("InstanceNorm1d", (1000,), {"affine": True}),
    ("InstanceNorm2d", (1000,), {"affine": True}),
    ("InstanceNorm3d", (1000,), {"affine": True}),
    ("ConvTranspose1d", (30, 2000, 5), {}),
    ("ConvTranspose2d", (30, 2000, (3, 2)), {"groups": 2}),
    ("ConvTranspose3d", (5, 2000, 3), {}),
    ("Bilinear", (30, 20, 2000), {}),
    ("EmbeddingBag", (500, 100), {}),
    ("PReLU", (7,), {}),
    ("RNN", (80, 400, 2), {}),
    ("LSTMCell", (80, 400), {}),
    ("GRUCell", (80, 400), {}),
    ("RNNCell", (80, 800), {}),
    ("TransformerEncoderLayer", (200, 4), {}),
    ("TransformerDecoderLayer", (200, 4), {}),
    ("LSTM", (80, 200, 2), {}),
    ("GRU", (80, 200), {"bidirectional": True}),
]

# SwiGLU is three Linear, stacks are layers, T5's table is of a library that is not there.
OWN = {"SwiGLU", "TransformerEncoder", "TransformerDecoder", "T5RelativeBias"}


def test_every_layer_with_parameters_is_there() -> None:
    public = {n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    with_parameters = {c.name for c in (*ROWS, *LAYER_TABLE) if list(c.ours().named_parameters())}
    containers = {"Sequential", "ModuleList", "ModuleDict"}
    assert with_parameters - containers <= {n for n, _, _ in LAYERS} | OWN
    assert public >= with_parameters


@pytest.mark.parametrize(("name", "arguments", "options"), LAYERS)
def test_defaults_of_a_layer(name: str, arguments: tuple, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    ours = getattr(nn, name)(*arguments, **options)
    theirs = getattr(torch.nn, name.replace("MultiHead", "Multihead"))(*arguments, **options)
    values, expected = ours.init(0), theirs.state_dict()
    assert values.keys() == expected.keys()
    for key, value in values.items():
        assert_same_distribution(value, expected[key].numpy(), f"{name}.{key}")


def test_uniform_defaults_stay_within_their_bounds() -> None:
    for layer, fan in (
        (nn.Linear(400, 300), 400),
        (nn.Conv2d(6, 100, (3, 2), groups=2), 18),
        (nn.GRU(10, 50), 50),
    ):
        for name, value in layer.init().items():
            bound = 1 / math.sqrt(fan)
            assert np.abs(value).max() <= bound, name
            assert np.abs(value).max() > 0.9 * bound, name


def test_the_padding_row_starts_at_zero() -> None:
    table = nn.Embedding(50, 20, padding_idx=-2).init()["weight"]
    assert not table[48].any()
    assert (table[np.arange(50) != 48] != 0).all()


class Net(nn.Module):
    def __init__(self, more: bool = False) -> None:
        self.fc1 = nn.Linear(3, 4)
        if more:
            self.extra = nn.Linear(4, 4)
            self.scale = nn.Parameter((4,), init.normal())
        self.fc2 = nn.Linear(4, 3)


def test_a_seed_gives_the_same_values() -> None:
    first, again, other = Net().init(7), Net().init(7), Net().init(8)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        assert not np.array_equal(value, other[name]), name
        assert value.dtype == np.float32


def test_every_parameter_has_a_stream_of_its_own() -> None:
    values = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).init(0)
    assert not np.array_equal(values["0.weight"], values["1.weight"])
    assert not np.array_equal(values["0.bias"], values["1.bias"])


LARGE = (init.PART + init.PART // 2, 2)  # three parts


@pytest.mark.parametrize(
    "make", [init.normal(1, 2), init.uniform(-1, 3)], ids=["normal", "uniform"]
)
def test_a_large_array_is_the_same_on_any_number_of_processors(
    make: init.Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make(LARGE, init.stream(0, "w"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    np.testing.assert_array_equal(make(LARGE, init.stream(0, "w")), found)
    parts = found.reshape(3, -1)
    assert len({p.tobytes() for p in parts}) == 3
    for part in parts:
        assert abs(part.mean() - 1) < 0.01
    # The first numbers are those of a smaller array, which has one stream.
    np.testing.assert_array_equal(make((8,), init.stream(0, "w")), found.reshape(-1)[:8])


def test_a_generator_that_cannot_jump_draws_all_at_once() -> None:
    rng, same = (np.random.Generator(np.random.SFC64(5)) for _ in range(2))
    np.testing.assert_array_equal(init.normal()(LARGE, rng), same.normal(size=LARGE))


def test_adding_a_parameter_changes_no_other() -> None:
    few, more = Net().init(3), Net(more=True).init(3)
    assert set(more) - set(few) == {"extra.weight", "extra.bias", "scale"}
    for name, value in few.items():
        np.testing.assert_array_equal(value, more[name])


def test_a_compiled_model_starts_with_the_same_values() -> None:
    model = Net()
    forward = td.compile_forward(model, lambda m, b: m.fc1(b), td.Spec((2, 3)), seed=5)
    for name, value in model.init(5).items():
        np.testing.assert_array_equal(forward.params[name], value)


def test_first_values_are_those_of_the_declared_dtype() -> None:
    half = nn.Parameter((3,), init.constant(0.1), dtype=td.float16)
    assert half.first_value(0, "w").dtype == np.float16
    count = nn.State((), init.ones, td.int64)
    assert count.first_value(0, "n") == 1
    assert count.first_value(0, "n").dtype == np.int64


class Odd(nn.Module):
    def __init__(self, first: Any, shape: tuple[int, ...] = (3,)) -> None:
        self.weight = nn.Parameter(shape, first)


MISTAKES = [
    (lambda: init.normal(0.0, -1.0), td.ArgumentError, "normal", "std = -1.0"),
    (lambda: init.uniform(1.0, 0.0), td.ArgumentError, "uniform", "low = 1.0", "low ≤ high"),
    (lambda: init.truncated_normal(0, 0), td.ArgumentError, "truncated_normal", "std = 0"),
    (lambda: init.truncated_normal(low=1, high=1), td.ArgumentError, "truncated_normal", "1 and 1"),
    (lambda: init.truncated_normal(9.0), td.ArgumentError, "truncated_normal", "mean 9.0"),
    (lambda: init.truncated_normal(math.nan), td.ArgumentError, "truncated_normal", "nan"),
    (lambda: Odd(init.xavier_uniform()).init(), td.ArgumentError, "init", "(3,)", "two axes"),
    (lambda: Odd(init.kaiming_normal()).init(), td.ArgumentError, "init", "(3,)"),
    (lambda: Odd(init.orthogonal()).init(), td.ArgumentError, "init", "(3,)"),
    (
        lambda: Odd(init.kaiming_normal(mode="fan"), (2, 3)).init(),
        td.ArgumentError, "kaiming", "'fan'", '"fan_in"',
    ),
    (
        lambda: Odd(init.kaiming_normal(nonlinearity="swish"), (2, 3)).init(),
        td.ArgumentError, "gain", "'swish'", "relu",
    ),
    (lambda: Odd(init.literal([1.0])).init(), td.ArgumentError, "literal", "(1,)", "(3,)"),
    (lambda: Odd(lambda s, r: np.ones(2)).init(), td.ShapeError, "init", "weight", "(2,)"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: f"{m[2]}-{m[0].__code__.co_firstlineno}"
)
def test_mistakes(mistake: tuple) -> None:
    refused(*mistake)
