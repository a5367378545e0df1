"""Every layer beside PyTorch's, in float64: names, values, gradients, states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from layer_cases import Case, Draw, TorchRotary, built, case, chain, floats, integers
from layer_rows import PLAIN, ROWS
from refusals import refused
from treadle import nn
from treadle.base import trees

# torch says so of even kernels, which is one of the configurations.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

TOLERANCE = 1e-10


def recurrent(name: str, states: int) -> list[Case]:
    """States (layers · ways, N, hidden) follow x; LSTM takes a pair of them."""

    def initial(*shape: int) -> Any:
        return (floats(*shape), floats(*shape)) if states == 2 else floats(*shape)

    deep = {"input_size": 3, "hidden_size": 2, "num_layers": 3, "dropout": 1.0}
    return [
        case(name, (3, 4), floats(5, 2, 3)),
        case(name, (3, 4), floats(5, 2, 3), initial(1, 2, 4)),
        case(name, (2, 3, 2), floats(4, 3, 2), initial(2, 3, 3)),
        case(name, {"input_size": 2, "hidden_size": 3, "bias": False}, floats(3, 2, 2)),
        case(
            name, {"input_size": 2, "hidden_size": 3, "batch_first": True}, floats(2, 4, 2),
            initial(1, 2, 3),
        ),
        case(name, {"input_size": 3, "hidden_size": 2, "bidirectional": True}, floats(4, 2, 3)),
        case(
            name,
            {
                "input_size": 3, "hidden_size": 2, "num_layers": 2, "bidirectional": True,
                "batch_first": True, "bias": False,
            },
            floats(2, 3, 3),
            initial(4, 2, 2),
        ),
        case(name, (1, 1), floats(1, 1, 1)),
        case(name, deep, floats(3, 2, 3)),
    ]  # fmt: skip


def elementwise(name: str, *options: dict) -> list[Case]:
    edges = np.array([0.0, -0.0, 1e-8, -1e-8, 30.0, -30.0, 1e4, -1e4])
    given = options or ({},)
    return [
        case(name, o, x) for o in given for x in (floats(7), floats(2, 3, 4), floats(0, 3), edges)
    ]


def pooling(name: str) -> list[Case]:
    return [
        case(name, (2,), floats(2, 3, 6, 4)),
        case(name, (3, 2), floats(1, 2, 7, 8)),
        case(name, ((2, 3), (2, 1), (1, 0)), floats(2, 2, 5, 6)),
        case(name, (3, 1, 1), floats(1, 2, 4, 4)),
        case(name, (2,), floats(3, 5, 4)),  # without a batch axis
    ]


hidden_keys = np.zeros((2, 1, 1, 5))
hidden_keys[:, :, :, 4] = -math.inf

TABLE = [
    case("Linear", (3, 4), floats(2, 3)),
    case("Linear", (3, 4, False), floats(5, 3)),
    case("Linear", (5, 1), floats(5)),
    case("Linear", (2, 3), floats(2, 3, 4, 2)),
    case("Linear", (2, 3), floats(0, 2)),
    case("Embedding", (7, 3), integers(7, 2, 5)),
    case("Embedding", (7, 3, 2), np.array([[2, 0, 2], [6, 1, 2]])),
    case("Embedding", {"num_embeddings": 5, "embedding_dim": 1, "padding_idx": -1}, np.arange(5)),
    case("Embedding", (4, 2), np.array(3)),
    case("Embedding", (4, 2, 0), np.array([1, 1, 1, 0])),  # repeats add up
    case("LayerNorm", (5,), floats(3, 5)),
    case("LayerNorm", ((3, 4), 1e-3), floats(2, 3, 4)),
    case("LayerNorm", (4, 1e-5, False), floats(2, 3, 4)),
    case("LayerNorm", {"normalized_shape": 4, "bias": False}, floats(3, 4)),
    case("LayerNorm", ([2, 3],), floats(2, 3)),
    case("RMSNorm", (5,), floats(3, 5)),
    case("RMSNorm", ((3, 4), 1e-3), floats(2, 3, 4)),
    case("RMSNorm", (4, None, False), floats(2, 3, 4)),
    case("RMSNorm", {"normalized_shape": [2, 3], "eps": 0.1}, floats(4, 2, 3)),
    case("Dropout", (0.5,), floats(3, 4), modes=(False,)),
    case("Dropout", (), floats(3, 4), modes=(False,)),
    case("Dropout", (0.0,), floats(3, 4)),
    case("Dropout", (1.0,), floats(3, 4)),
    case("Conv1d", (2, 4, 3), floats(2, 2, 7)),
    case("Conv1d", (4, 6, 2, 2, 1, 2, 2), floats(1, 4, 9)),
    case("Conv1d", {"in_channels": 2, "out_channels": 3, "kernel_size": 4, "padding": "same"}, floats(2, 2, 6)),
    case("Conv1d", {"in_channels": 3, "out_channels": 3, "kernel_size": 1, "groups": 3, "bias": False}, floats(2, 3, 4)),
    case("Conv2d", (2, 4, 3), floats(2, 2, 5, 6)),
    case("Conv2d", (2, 3, (2, 3), (2, 1), (1, 0)), floats(2, 2, 5, 6)),
    case("Conv2d", (4, 4, 3, 1, 2, 2, 4), floats(1, 4, 5, 5)),
    case("Conv2d", {"in_channels": 2, "out_channels": 3, "kernel_size": (2, 3), "padding": "same", "dilation": (1, 2)}, floats(1, 2, 4, 5)),
    case("Conv2d", {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "padding": "valid", "bias": False}, floats(2, 2, 4, 4)),
    case("Conv1d", {"in_channels": 2, "out_channels": 3, "kernel_size": 4, "padding": "same", "padding_mode": "circular"}, floats(2, 2, 7)),
    case("Conv2d", {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 5), "padding": (1, 2), "padding_mode": "reflect"}, floats(2, 2, 5, 6)),
    case("Conv3d", {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1, "stride": 2, "padding_mode": "replicate"}, floats(1, 2, 4, 5, 3)),
    case("Conv3d", (1, 2, 2), floats(2, 1, 3, 4, 3)),
    case("Conv3d", (2, 2, (1, 2, 3), (1, 2, 1), (0, 1, 1)), floats(1, 2, 3, 4, 4)),
    case("Conv3d", (2, 4, 2, 1, 0, 2, 2), floats(1, 2, 4, 3, 3)),
    case("Conv3d", {"in_channels": 1, "out_channels": 2, "kernel_size": 3, "padding": "same", "bias": False}, floats(1, 1, 3, 3, 2)),
    *pooling("MaxPool2d"),
    case("MaxPool2d", (2, 1, 0, (1, 2)), floats(1, 1, 4, 5)),
    case("MaxPool2d", (2,), np.zeros((1, 1, 4, 4))),  # the first of equals has the gradient
    *pooling("AvgPool2d"),
    case("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, floats(1, 2, 6, 5)),
    case("BatchNorm1d", (3,), floats(4, 3)),
    case("BatchNorm1d", (3, 1e-3, 0.3), floats(4, 3, 2)),
    case("BatchNorm1d", (2, 1e-5, None), floats(5, 2)),
    case("BatchNorm1d", (2, 1e-5, 0.1, False), floats(3, 2, 4)),
    case("BatchNorm1d", (2, 1e-5, 0.1, True, False), floats(3, 2)),
    case("BatchNorm1d", (2, 1e-5, 0.0), floats(1, 2, 3)),
    case("BatchNorm2d", (3,), floats(2, 3, 4, 2)),
    case("BatchNorm2d", (2, 1e-2, 0.5), floats(3, 2, 2, 2)),
    case("BatchNorm2d", (2, 1e-5, None, False), floats(2, 2, 3, 2)),
    case("BatchNorm2d", (2, 1e-5, 0.1, False, False), floats(2, 2, 3, 2)),
    case("BatchNorm2d", {"num_features": 1, "momentum": 1.0}, floats(2, 1, 2, 2)),
    case("MultiHeadAttention", (4, 2), floats(5, 2, 4)),
    case("MultiHeadAttention", {"embed_dim": 6, "num_heads": 3, "bias": False}, floats(4, 1, 6), causal=True),
    case("MultiHeadAttention", {"embed_dim": 4, "num_heads": 1, "batch_first": True}, floats(2, 5, 4), causal=True),
    case("MultiHeadAttention", {"embed_dim": 4, "num_heads": 2, "batch_first": True}, floats(2, 5, 4), bias=hidden_keys),
    case("MultiHeadAttention", (4, 2), floats(5, 2, 4), bias=np.linspace(-2, 2, 25).reshape(5, 5)),
    case("MultiHeadAttention", (4, 2), floats(5, 2, 4), bias=hidden_keys, causal=True),
    case("MultiHeadAttention", (4, 4), floats(3, 2, 4), floats(5, 2, 4)),
    case("MultiHeadAttention", {"embed_dim": 4, "num_heads": 2, "batch_first": True}, floats(2, 3, 4), floats(2, 5, 4), floats(2, 5, 4), bias=hidden_keys),
    case("RotaryEmbedding", (4,), floats(2, 3, 5, 4)),
    case("RotaryEmbedding", (6, 100.0), floats(3, 6)),
    case("RotaryEmbedding", {"dim": 2}, floats(2, 1, 2)),
    case("RotaryEmbedding", (8, 500000.0), floats(1, 2, 7, 8), offset=11),
    case("SwiGLU", (3, 5), floats(2, 3)),
    case("SwiGLU", (4, 2, True), floats(2, 3, 4)),
    case("SwiGLU", (1, 1), floats(4, 1)),
    case("SwiGLU", {"dim": 2, "hidden_dim": 6}, floats(2)),
    *recurrent("LSTM", 2),
    *recurrent("GRU", 1),
    built("Sequential", lambda n: n.Sequential(n.Linear(3, 4), n.ReLU(), n.Linear(4, 2)), floats(5, 3)),
    built("Sequential", lambda n: n.Sequential(), floats(2, 3)),
    built("Sequential", lambda n: n.Sequential(n.Sequential(n.Linear(2, 2), n.Tanh()), n.LayerNorm(2)), floats(3, 2)),
    built("Sequential", lambda n: n.Sequential(n.Conv2d(1, 2, 2), n.BatchNorm2d(2), n.GELU(), n.MaxPool2d(2), n.Flatten()), floats(2, 1, 5, 5)),
    chain(),
    chain(lambda n: n.Linear(4, 4)),
    chain(lambda n: n.Linear(4, 4, bias=False), lambda n: n.SiLU(), lambda n: n.Linear(4, 4)),
    chain(lambda n: n.Sequential(n.LayerNorm(4), n.Linear(4, 4)), lambda n: n.Identity()),
    case("Flatten", (), floats(2, 3, 4)),
    case("Flatten", (0,), floats(2, 3, 4)),
    case("Flatten", (1, 2), floats(2, 3, 4, 5)),
    case("Flatten", (-2, -1), floats(2, 3, 4)),
    case("Identity", (), floats(3)),
    case("Identity", (), floats()),
    case("Identity", (), integers(9, 2, 2)),
    case("Identity", (), floats(0, 2)),
    *elementwise("ReLU"),
    *elementwise("GELU", {}, {"approximate": "tanh"}),
    *elementwise("SiLU"),
    *elementwise("Tanh"),
    *elementwise("Sigmoid"),
    case("Softmax", (-1,), floats(3, 4)),
    case("Softmax", (0,), floats(3, 4)),
    case("Softmax", {"dim": 1}, floats(2, 3, 4)),
    case("Softmax", (-1,), np.array([[1000.0, -1000.0, 0.0], [-math.inf, 0.0, 1.0]])),
    *ROWS,
    # Rows that fill the lanes of a vector and leave a rest.
    case("Linear", (33, 17), floats(19, 33)),
    case("RMSNorm", (33, 1e-4), floats(17, 33)),
    case("Dropout", (0.9,), floats(17, 5), modes=(False,)),
    case("Conv1d", (3, 17, 3, 1, 1), floats(2, 3, 33)),
    case("Conv3d", (3, 5, 3, 1, 1), floats(1, 3, 4, 3, 17)),
    case("RotaryEmbedding", (34,), floats(3, 17, 34)),
    case("SwiGLU", (17, 33), floats(5, 17)),
    built("Sequential", lambda n: n.Sequential(n.Linear(17, 33), n.GELU(), n.Linear(33, 5)), floats(9, 17)),
    chain(lambda n: n.Linear(4, 4), lambda n: n.Sigmoid())._replace(inputs=(floats(17, 4),)),
    case("Flatten", (1, -1), floats(17, 3, 11)),
    *(case("Identity", (), x) for x in (floats(17, 5), floats(1, 33), floats(2, 3, 4))),
    *(case(name, (), x) for name in ("ReLU", "SiLU", "Tanh", "Sigmoid") for x in (floats(17, 5), floats(1, 33))),
    case("Softmax", (-1,), floats(17, 33)),
    *(case(name, (), floats(1, 33), modes=(False,)) for name in PLAIN),
    case("Threshold", (-0.3, 0.5), floats(1, 33), modes=(False,)),
    case("PReLU", (17,), floats(3, 17, 5)),
]  # fmt: skip

# Public classes of nn that have no row.
EXCEPTIONS = {
    "Module": "the base: test_modules.py",
    "Parameter": "a declaration: test_modules.py",
    "State": "a declaration: test_modules.py",
    "ModuleDict": "a container: test_modules.py",
    "KVCache": "has states to be written: test_transformers.py",
    "T5RelativeBias": "a bias of no input: test_transformers.py",
}


def numbered(table: list[Case]) -> list[str]:
    seen: dict[str, int] = {}
    for c in table:
        seen[c.name] = seen.get(c.name, 0) + 1
    counts = dict.fromkeys(seen, 0)
    names = []
    for c in table:
        names.append(f"{c.name}-{counts[c.name]}")
        counts[c.name] += 1
    return names


IDS = numbered(TABLE)
MODES = [
    pytest.param(c, mode, id=f"{i}-{'training' if mode else 'eval'}")
    for c, i in zip(TABLE, IDS, strict=True)
    for mode in c.modes
]


def prepared(c: Case) -> tuple[nn.Module, torch.nn.Module, dict[str, np.ndarray]]:
    """Both modules, and random values that torch's now has: none of them 0 or 1 as at first."""
    torch.manual_seed(0)
    ours, theirs = c.ours(), c.theirs().double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.copy_(torch.as_tensor(rng.standard_normal(tensor.shape)))
        for name, tensor in theirs.named_buffers():
            if "running" in name:
                tensor.copy_(torch.as_tensor(rng.uniform(0.5, 2.0, tensor.shape)))
    return ours, theirs, {n: t.numpy().copy() for n, t in theirs.state_dict().items()}


def arrays_of(c: Case, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    return trees.map_leaves(lambda x: x.array(rng) if isinstance(x, Draw) else x, list(c.inputs))


def tracked(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, requires_grad=array.dtype.kind == "f")


def gradients(outputs: Any, cts: list[np.ndarray], leaves: list[torch.Tensor]) -> list[np.ndarray]:
    """torch's gradients; zeros where nothing depends."""
    pairs = [(o, ct) for o, ct in zip(outputs, cts, strict=True) if o.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not pairs or not wanted:
        return [np.zeros(t.shape) for t in wanted]
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [torch.as_tensor(ct) for _, ct in pairs], allow_unused=True
    )
    return [
        np.zeros(t.shape) if g is None else g.numpy() for g, t in zip(found, wanted, strict=True)
    ]


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    a, b = np.asarray(ours), np.asarray(theirs)
    assert a.shape == b.shape, what
    np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def test_every_public_class_has_rows_or_a_reason() -> None:
    public = {n for n, v in vars(nn).items() if isinstance(v, type) and not n.startswith("_")}
    rows = {c.name for c in TABLE}
    assert rows | set(EXCEPTIONS) == public
    assert not rows & set(EXCEPTIONS)


@pytest.mark.parametrize("name", sorted({c.name for c in TABLE}))
def test_at_least_five_configurations(name: str) -> None:
    assert sum(c.name == name for c in TABLE) >= 5


@pytest.mark.parametrize("c", TABLE, ids=IDS)
def test_names_and_shapes_are_pytorchs(c: Case) -> None:
    ours, theirs = c.ours(), c.theirs()
    declared = {n: d.shape for n, d in ours.declarations().items()}
    assert declared == {n: tuple(t.shape) for n, t in theirs.state_dict().items()}
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert {n for n, _ in ours.named_states()} == {n for n, _ in theirs.named_buffers()}


@pytest.mark.parametrize(("c", "training"), MODES)
def test_values_and_gradients(c: Case, training: bool) -> None:
    ours, theirs, values = prepared(c)
    theirs.train(training)
    inputs = arrays_of(c)
    params = {n: values[n] for n, _ in ours.named_parameters()}
    states = {n: values[n] for n, _ in ours.named_states()}

    torch_inputs = trees.map_leaves(tracked, inputs)
    keywords = {
        n: torch.tensor(v) if isinstance(v, np.ndarray) else v for n, v in c.keywords.items()
    }
    expected, structure = trees.flatten(theirs(*torch_inputs, **keywords))
    result, pull = td.vjp(
        lambda params, *inputs: ours.apply(
            params | states, *inputs, training=training, **c.keywords
        ),
        params,
        *inputs,
    )
    found, ours_structure = trees.flatten(result)
    assert ours_structure == structure
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype is td.float64 if b.is_floating_point() else a.dtype.is_integer
        assert_close(a.numpy(), b.detach().numpy(), f"result {i}")

    rng = np.random.default_rng(2)
    cts = [rng.standard_normal(t.shape) for t in expected]
    by_torch = gradients(expected, cts, [*theirs.parameters(), *trees.flatten(torch_inputs)[0]])
    param_gradients, *input_gradients = pull(structure.rebuild(cts))
    named = dict(param_gradients)
    for i, (x, g) in enumerate(
        zip(trees.flatten(inputs)[0], trees.flatten(list(input_gradients))[0], strict=True)
    ):
        if x.dtype.kind == "f":
            named[f"input {i}"] = g
    assert len(named) == len(by_torch)
    for (name, a), b in zip(named.items(), by_torch, strict=True):
        assert_close(a.numpy(), b, f"gradient of {name}")


STATEFUL = [
    pytest.param(c, id=i)
    for c, i in zip(TABLE, IDS, strict=True)
    if dict(c.theirs().named_buffers())
]


@pytest.mark.parametrize("c", STATEFUL)
def test_states_after_three_training_calls(c: Case) -> None:
    ours, theirs, values = prepared(c)
    (spec,) = (td.Spec(x.shape) for x in arrays_of(c))
    forward = td.compile_forward(ours, lambda m, b: m(b), spec, training=True, device="oracle")
    forward.load_params(values)
    for call in range(3):
        (batch,) = arrays_of(c, seed=10 + call)
        expected = theirs(torch.as_tensor(batch))
        assert_close(forward(batch), expected.detach().numpy(), f"call {call}")
        for name, b in theirs.state_dict().items():
            assert_close(forward.params[name], b.numpy(), f"{name} after call {call}")
    moved = [n for n in values if not np.array_equal(values[n], forward.params[n])]
    assert any("running" in n or "num_batches_tracked" in n for n in moved)


@pytest.mark.parametrize("c", STATEFUL)
def test_states_stay_in_evaluation(c: Case) -> None:
    ours, theirs, values = prepared(c)
    theirs.eval()
    (batch,) = arrays_of(c)
    forward = td.compile_forward(ours, lambda m, b: m(b), td.Spec(batch.shape), device="oracle")
    forward.load_params(values)
    for _ in range(2):
        assert_close(forward(batch), theirs(torch.as_tensor(batch)).detach().numpy(), "eval")
    for name, value in values.items():
        np.testing.assert_array_equal(forward.params[name], value)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_and_scales(p: float) -> None:
    n = 40_000
    forward = td.compile_forward(
        nn.Dropout(p), lambda m, b: m(b), td.Spec((n,)), training=True, device="oracle"
    )
    x = np.linspace(1.0, 2.0, n)
    first, second = forward(x), forward(x)
    for out in (first, second):
        kept = out != 0
        # Six standard deviations of a binomial share.
        assert abs(kept.mean() - (1 - p)) < 6 * math.sqrt(p * (1 - p) / n)
        np.testing.assert_allclose(out[kept], x[kept] / (1 - p), rtol=1e-12)
    # Two calls draw apart: they agree where two coins would.
    agree = ((first != 0) == (second != 0)).mean()
    assert abs(agree - (p * p + (1 - p) ** 2)) < 6 * 0.5 / math.sqrt(n)
    # Neighbours do not know of each other.
    kept = first != 0
    pairs = (kept[1:] & kept[:-1]).mean()
    assert abs(pairs - (1 - p) ** 2) < 6 * 0.5 / math.sqrt(n / 2)


def test_dropout_gradient_is_its_mask() -> None:
    layer = nn.Dropout(0.25)
    x = np.random.default_rng(0).standard_normal(1000)
    out, pull = td.vjp(lambda x: layer.apply({}, x, training=True), x)
    (gradient,) = pull(np.ones(1000))
    np.testing.assert_allclose(out.numpy(), x * gradient.numpy(), rtol=1e-12)
    assert set(np.unique(gradient.numpy())) == {0.0, 1 / 0.75}


def test_dropout_layers_of_one_model_draw_apart() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    forward = td.compile_forward(
        model, lambda m, b: (m[0](b), m[1](b)), td.Spec((64,)), training=True, device="oracle"
    )
    first, second = forward(np.ones(64))
    assert not np.array_equal(first, second)


def test_dropout_of_a_seed_is_repeated() -> None:
    def run(seed: int) -> np.ndarray:
        return td.compile_forward(
            nn.Dropout(), lambda m, b: m(b), td.Spec((64,)), training=True, seed=seed
        )(np.ones(64))

    np.testing.assert_array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_dropout_between_recurrent_layers() -> None:
    """Zeroed outputs of the first layer reach the second; the last layer's are whole."""
    layer = nn.GRU(3, 8, num_layers=2, dropout=0.5)
    params, x = layer.init(), np.random.default_rng(0).standard_normal((4, 2, 3))
    still, (trained, again) = (
        layer.apply(params, x)[0].numpy(),
        (layer.apply(params, x, training=True)[0].numpy() for _ in range(2)),
    )
    assert not np.allclose(still, trained)
    assert not np.allclose(trained, again)
    assert (trained != 0).all()


def test_embedding_keeps_the_value_of_its_padding_row() -> None:
    """A loaded table is used as it is; only the gradient of that row is cut."""
    layer = nn.Embedding(3, 2, padding_idx=1)
    assert not layer.init()["weight"][1].any()
    table = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(layer.apply({"weight": table}, np.array([1])).numpy(), [[2, 3]])


def test_recurrent_parameters_may_be_wider_than_x() -> None:
    layer = nn.LSTM(2, 3)
    wide = {n: v.astype(np.float64) for n, v in layer.init().items()}
    output, _ = layer.apply(wide, np.ones((4, 1, 2), np.float32))
    assert output.dtype is td.float64


def test_rotary_offset_may_be_traced() -> None:
    layer = nn.RotaryEmbedding(4)
    x = np.random.default_rng(0).standard_normal((3, 4))
    specs = td.Spec((3, 4)), td.Spec((), td.int32)
    program = td.compile(lambda x, i: layer(x, i), *specs, device="oracle")
    for offset in (0, 5):
        expected = TorchRotary(4)(torch.as_tensor(x), offset).numpy()
        assert_close(program(x, np.int32(offset)), expected, f"offset {offset}")


def test_rotary_scores_depend_on_distances_only() -> None:
    rotate = nn.RotaryEmbedding(8)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 8))
    scores = [
        (rotate.apply({}, q, offset=i + 3) * rotate.apply({}, k, offset=i)).sum().item()
        for i in range(4)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-12)


x23 = td.zeros((2, 3))
image = td.zeros((1, 2, 4, 4))


linear = nn.Linear(4, 2)
norm = nn.LayerNorm((2, 4))
rms = nn.RMSNorm(4)
batch_norm = nn.BatchNorm1d(3)
image_norm = nn.BatchNorm2d(3)
conv = nn.Conv2d(3, 4, 3)
attention = nn.MultiHeadAttention(4, 2)
rotary = nn.RotaryEmbedding(4)
lstm = nn.LSTM(3, 4)
gru = nn.GRU(3, 4)
table = nn.Embedding(3, 2)

MISTAKES = [
    (lambda: linear.apply(linear.init(), x23), td.ShapeError, "linear", "float32[2,3]"),
    (lambda: norm.apply(norm.init(), x23), td.ShapeError, "LayerNorm", "float32[2,3]", "(2, 4)"),
    (lambda: rms.apply(rms.init(), x23), td.ShapeError, "RMSNorm", "float32[2,3]", "(4,)"),
    (lambda: batch_norm.apply(batch_norm.init(), image), td.ShapeError, "BatchNorm1d", "3 features"),
    (lambda: image_norm.apply(image_norm.init(), image), td.ShapeError, "BatchNorm2d", "3 features"),
    (
        lambda: batch_norm.apply(batch_norm.init(), td.zeros((1, 3)), training=True),
        td.ShapeError, "BatchNorm1d", "float32[1,3]", "training=False",
    ),
    (lambda: conv.apply(conv.init(), image), td.ShapeError, "conv", "float32[1,2,4,4]"),
    (lambda: nn.Conv1d(2, 4, (3, 3)), td.ArgumentError, "Conv1d", "(3, 3)", "one, or 1"),
    (lambda: nn.Conv2d(3, 4, 3, groups=2), td.ArgumentError, "Conv2d", "2 groups", "divides"),
    (lambda: nn.Conv2d(2, 4, 3, groups=0), td.ArgumentError, "Conv2d", "groups = 0"),
    (lambda: nn.MultiHeadAttention(4, 3), td.ArgumentError, "MultiHeadAttention", "3 heads"),
    (lambda: nn.MultiHeadAttention(4, 0), td.ArgumentError, "MultiHeadAttention", "num_heads = 0"),
    (
        lambda: attention.apply(attention.init(), x23),
        td.ShapeError, "MultiHeadAttention", "query", "float32[2,3]", "batch_first",
    ),
    (
        lambda: attention.apply(attention.init(), td.zeros((2, 1, 4)), td.zeros((2, 1, 5))),
        td.ShapeError, "MultiHeadAttention", "key", "float32[2,1,5]",
    ),
    (lambda: nn.RotaryEmbedding(5), td.ArgumentError, "RotaryEmbedding", "5", "even"),
    (lambda: rotary.apply({}, x23), td.ShapeError, "RotaryEmbedding", "float32[2,3]", "4"),
    (lambda: nn.Dropout(1.5), td.ArgumentError, "Dropout", "1.5"),
    (lambda: nn.LSTM(3, 0), td.ArgumentError, "LSTM", "at least 1"),
    (lambda: nn.GRU(3, 4, num_layers=0), td.ArgumentError, "GRU", "num_layers = 0"),
    (lambda: lstm.apply(lstm.init(), x23[0]), td.ShapeError, "LSTM", "float32[3]", "batch_first"),
    (
        lambda: gru.apply(gru.init(), td.zeros((5, 2, 3)), td.zeros((1, 3, 4))),
        td.ShapeError, "GRU", "float32[1,3,4]", "(1, 2, 4)",
    ),
    (
        lambda: lstm.apply(lstm.init(), td.zeros((5, 2, 3)), (td.zeros((1, 2, 4)),)),
        td.ShapeError, "LSTM", "float32[1,2,4]", "Give 2",
    ),
    (lambda: nn.Embedding(3, 2, padding_idx=3), td.ArgumentError, "Embedding", "3 of 3 rows"),
    (lambda: table.apply(table.init(), x23), td.DTypeError, "embedding", "float32[2,3]"),
    (lambda: nn.Sequential(nn.ReLU(), td.tanh), td.ArgumentError, "Sequential", "not a module"),
    (lambda: nn.ModuleList([3]), td.ArgumentError, "ModuleList", "3 is not a module"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: f"{m[2]}-{m[0].__code__.co_firstlineno}"
)
def test_mistakes(mistake: tuple) -> None:
    refused(*mistake)
