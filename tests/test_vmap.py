"""`vmap` beside PyTorch's, with other transformations inside and around it, and natively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from treadle import losses, nn, optim
from treadle.backends.registry import backend
from treadle.base import trees
from treadle.domains.float64 import evaluate_float64
from treadle.ir.verify import verify

rng = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def same(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    first, structure = trees.flatten(ours)
    second, other = trees.flatten(theirs)
    assert structure == other
    for a, b in zip(first, second, strict=True):
        assert tuple(a.shape) == tuple(b.shape)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), tolerance, tolerance)


def in_torch(tree: Any) -> Any:
    return trees.map_leaves(torch.tensor, tree)


def compiled(function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> Any:
    def spec(a: np.ndarray) -> td.Spec:
        return td.Spec(a.shape, td.int32 if a.dtype.kind == "i" else td.float32)

    specs = trees.map_leaves(spec, list(arguments))
    return td.compile(function, *specs, device=device)(*arguments)


# A function that is written the same in both, its arguments, in_dims and out_dims.
FORMS: list[tuple[Callable[..., Any], tuple[Any, ...], Any, Any]] = [
    (lambda x, y: x * y, (normal(5, 3), normal(5, 3)), 0, 0),
    (lambda x, y: x * y, (normal(5, 3), normal(3)), (0, None), 0),
    (lambda x, y: x @ y, (normal(5, 3), normal(3, 2)), (0, None), 0),
    (lambda x, y: x @ y, (normal(2, 3), normal(3, 4, 5)), (None, 2), 1),
    (lambda x, y: x @ y, (normal(2, 5, 3), normal(3, 4, 5)), (1, -1), -1),
    (lambda x: x.sum(), (normal(5, 3),), -1, 0),
    (lambda x: (x, x.sum(0)), (normal(5, 3, 2),), 0, (1, 0)),
    (lambda x: (x, x.sum(0)), (normal(5, 3, 2),), 0, -1),
    (lambda x, y: (x + y, y * 2), (normal(5), normal(3)), (0, None), (0, None)),
    (lambda x, y: (x + y, y * 2), (normal(5), normal(3)), [0, None], 0),
    (lambda t, y: t["a"] * t["b"] + y, ({"a": normal(4, 3), "b": normal(3)}, normal(3, 4)),
     ({"a": 0, "b": None}, 1), 0),
    (lambda t: {"s": t[0] * 2, "p": (t[1], t[0])}, ([normal(4), normal(2, 4)],), ([0, 1],),
     {"s": 0, "p": (1, 0)}),
    (lambda x: x[1:] * x[:-1], (normal(3, 0, 4)[:, :0],), 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(FORMS)))
def test_forms_are_those_of_pytorch(i: int) -> None:
    function, arguments, in_dims, out_dims = FORMS[i]
    dims = tuple(in_dims) if isinstance(in_dims, list) else in_dims
    theirs = torch.func.vmap(function, dims, out_dims)(*in_torch(arguments))
    same(td.vmap(function, in_dims, out_dims)(*arguments), theirs)
    specs = trees.map_leaves(lambda a: td.Spec(a.shape), list(arguments))
    graph = verify(td.trace(td.vmap(function, in_dims, out_dims), *specs))
    found = evaluate_float64(graph, dict(zip(graph.leaves, trees.flatten(arguments)[0])))
    same(list(found), trees.flatten(theirs)[0])


def test_a_keyword_is_not_mapped() -> None:
    x, y = normal(4, 3), normal(3)
    same(td.vmap(lambda x, shift: x + shift)(x, shift=y), x + y)


def test_nested() -> None:
    x, y = normal(4, 3), normal(5, 3)
    dot = lambda a, b: (a * b).sum()  # noqa: E731
    table = td.vmap(td.vmap(dot, (None, 0)), (0, None))
    same(table(x, y), x @ y.T, 1e-5)
    same(td.vmap(td.vmap(td.vmap(lambda x: x * x)))(normal(2, 3, 4) * 0 + 2), np.full((2, 3, 4), 4))


def test_empty_batches() -> None:
    x = np.zeros((0, 2, 3, 4), np.float32)
    assert td.vmap(td.softmax)(x).shape == x.shape
    conv = td.vmap(lambda x: td.conv(x, np.ones((2, 3, 2), np.float32)))
    assert conv(x).shape == (0, 2, 2, 3)


def test_work_on_what_is_not_mapped_is_done_once() -> None:
    def function(x: td.Tensor, w: td.Tensor) -> td.Tensor:
        return x @ td.tanh(w)

    graph = td.trace(td.vmap(function, (0, None)), td.Spec((7, 3)), td.Spec((3, 2)))
    (node,) = (n for n in graph.nodes if n.op.name == "tanh")
    assert node.types[0].shape == (3, 2)
    (product,) = (n for n in graph.nodes if n.op.name == "contract")
    assert product.attributes.spec == "ab,bc->ac"


def test_gradients_per_sample_and_of_the_whole() -> None:
    w, x, y = normal(3, 2), normal(5, 3), normal(5, 2)

    def ours(w: Any, x: Any, y: Any) -> Any:
        return ((x @ w).tanh() - y).square().sum()

    each = td.vmap(td.value_and_grad(ours, (0, 1)), (None, 0, 0))(w, x, y)
    value = torch.func.vmap(ours, (None, 0, 0))(*in_torch((w, x, y)))
    rows = []
    for xi, yi in zip(*in_torch((x, y)), strict=True):
        given = torch.tensor(w, requires_grad=True), xi.requires_grad_()
        rows.append(torch.autograd.grad(ours(*given, yi), given))
    gradient = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    same(each, (value, gradient), 1e-5)
    whole = td.grad(lambda w: td.vmap(ours, (None, 0, 0))(w, x, y).sum())(w)
    same(whole, gradient[0].sum(0), 1e-5)
    hessian = td.vmap(lambda v: td.jvp(td.grad(ours), [w, x[0], y[0]], [v, 0 * x[0], 0 * y[0]])[1])
    basis = np.eye(6, dtype=np.float32).reshape(6, 3, 2)
    at = in_torch((x[0], y[0]))
    theirs = torch.autograd.functional.hessian(lambda w: ours(w, *at), torch.tensor(w))
    same(hessian(basis), theirs.reshape(6, 3, 2), 1e-5)


def looped(w: td.Tensor, xs: td.Tensor, h: td.Tensor) -> td.Tensor:
    """A scan with a constant, a carry and slices, and a carry that is mapped only later."""

    def step(carry: Any, x: td.Tensor) -> Any:
        h, total, fixed = carry
        h = td.tanh(h * w + x)
        return (h, total + h, fixed * 2), (h, fixed)

    (last, total, _), (states, fixed) = td.scan(step, (h, td.zeros_like(h), td.ones((2,))), xs)
    return (last * total).sum() + (states * fixed).sum()


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_loops(dims: tuple[int | None, ...]) -> None:
    given = [normal(3, *s) if d == 0 else normal(*s)
             for s, d in zip(((2,), (5, 2), (2,)), dims, strict=True)]  # fmt: skip
    found = td.vmap(td.value_and_grad(looped, (0, 1, 2)), dims)(*given)
    rows = [
        td.value_and_grad(looped, (0, 1, 2))(
            *(a[i] if d == 0 else a for a, d in zip(given, dims, strict=True))
        )
        for i in range(3)
    ]
    stacked = [np.stack(column) for column in zip(*(trees.flatten(r)[0] for r in rows))]
    same(trees.flatten(found)[0], stacked, 1e-5)
    mapped = td.grad(lambda w: td.vmap(looped, (None, *dims[1:]))(w, *given[1:]).sum())
    if dims[0] is None:
        same(mapped(given[0]), stacked[1].sum(0), 1e-5)


def test_custom_gradients_and_checkpoints() -> None:
    twice = td.custom_vjp(lambda x, w: x * w, lambda ct, out, x, w: (ct * 2 * w, ct + out))
    x, w = normal(4, 3), normal(3)
    found = td.vmap(td.grad(lambda x, w: twice(x, w).sum(), (0, 1)), (0, None))(x, w)
    same(found, (np.tile(2 * w, (4, 1)), 1 + x * w), 1e-6)
    whole = td.grad(lambda x, w: td.vmap(twice, (0, None))(x, w).sum(), (0, 1))(x, w)
    same(whole, (np.tile(2 * w, (4, 1)), (1 + x * w).sum(0)), 1e-5)
    swapped = td.grad(lambda x, w: td.vmap(twice, (None, 0))(w, x).sum(), (0, 1))(x, w)
    same(swapped, (1 + x * w, (2 * x).sum(0)), 1e-5)
    kept = td.checkpoint(lambda x: td.tanh(x) * w)
    per = td.vmap(td.grad(lambda x: kept(x).sum()))(x)
    same(per, (1 - np.tanh(x) ** 2) * w, 1e-5)


def noise(x: td.Tensor) -> td.Tensor:
    def step(carry: td.Tensor, _: None) -> tuple[td.Tensor, td.Tensor]:
        return carry + td.random.uniform(()), td.random.uniform((2,))

    total, each = td.scan(step, x, None, 3)
    return td.concat([each.reshape(-1), td.random.uniform((2,)), total.reshape(1)])


def test_each_element_draws_its_own_noise() -> None:
    x = np.zeros(4, np.float32)
    different, equal = (td.vmap(noise, randomness=r)(x).numpy() for r in ("different", "same"))
    assert len(np.unique(different)) == different.size
    assert (equal == equal[0]).all()
    assert len(np.unique(equal[0])) == equal[0].size
    nested = td.vmap(td.vmap(lambda x: td.random.uniform((3,)) + x))(np.zeros((2, 3), np.float32))
    assert len(np.unique(nested.numpy())) == 18
    refused(lambda: td.vmap(noise, randomness="error")(x), td.ArgumentError, "vmap", "draws random")
    assert td.vmap(td.sin, randomness="error")(x).shape == (4,)


def test_captures_are_batches_and_metrics_means() -> None:
    def element(x: td.Tensor, w: td.Tensor) -> td.Tensor:
        td.capture("double", td.capture("same", w) * x)
        td.metric("mean", x * 2, weight=x)
        td.metric("plain", 7.0)
        return x

    mapped = td.vmap(element, (0, None))
    graph = td.trace(lambda x: mapped(x, td.tensor(3.0)).sum(), td.Spec((4,)))
    x = np.array([1, 2, 3, 4], np.float32)
    values = evaluate_float64(graph, {"x": x})
    found = {(o.kind.value, o.name): v for o, v in zip(graph.outputs, values, strict=True)}
    same(found["capture", "double"], 3 * x)
    same(found["capture", "same"], np.float32(3))
    same(found["metric", "mean"], 2 * (x * x).sum() / x.sum())
    same(found["weight", "mean"], x.sum())
    same(found["metric", "plain"], np.float32(7))
    same(found["weight", "plain"], np.float32(4))


def test_prints_show_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    td.vmap(lambda x: td.debug_print("x = {}", x))(np.array([1.0, 2.0]))
    assert capsys.readouterr().out == "x = [1. 2.]\n"


def test_a_state_has_one_next_value() -> None:
    layer = nn.BatchNorm1d(3)
    loss = lambda m, b: td.vmap(lambda x: m(x).sum())(b["x"]).sum()  # noqa: E731
    with pytest.raises(td.TraceError, match="updated inside td.vmap.*Return the value"):
        td.compile_step(layer, loss, optim.sgd(0.1), {"x": td.Spec((2, 4, 3))}, device="oracle")


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (lambda: td.vmap(td.sin, None)(X), td.ArgumentError, ("float32[2,3] along None",)),
        (lambda: td.vmap(lambda: X)(), td.ArgumentError, ("there is none",)),
        (lambda: td.vmap(td.add)(X, X.T), td.ShapeError, ("[2,3] along 0", "[3,2] along 0")),
        (lambda: td.vmap(td.add)(X, 1.0), td.AxisError, ("tensor 1", "float32[]", "None")),
        (lambda: td.vmap(td.sin, 2)(X), td.AxisError, ("axis 2", "float32[2,3]")),
        (lambda: td.vmap(td.add, (0,))(X, X), td.ArgumentError, ("(0,)", "[0, 1]")),
        (lambda: td.vmap(td.sin, "0")(X), td.ArgumentError, ("in_dims = '0'",)),
        (lambda: td.vmap(td.sin, True)(X), td.ArgumentError, ("in_dims = True",)),
        (lambda: td.vmap(td.sin, 0, None)(X), td.ArgumentError, ("result 0", "differs")),
        (lambda: td.vmap(td.sin, 0, 2)(X), td.AxisError, ("out_dims has the axis 2", "-2 to 1")),
        (lambda: td.vmap(td.sin, 0, (0, 0))(X), td.ArgumentError, ("out_dims = (0, 0)",)),
        (lambda: td.vmap(td.sin, randomness="any")(X), td.ArgumentError, ("'any'", "same")),
    ],
)  # fmt: skip
def test_refusals(call: Any, error: Any, fragments: tuple[str, ...]) -> None:
    refused(call, error, "vmap", *fragments)


class Net(nn.Module):
    """A little of everything: convolution, norms, attention, an embedding, dropout's noise."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.LayerNorm(3)
        self.attend = nn.MultiheadAttention(3, 1, batch_first=True)
        self.head = nn.Linear(3, 4)

    def forward(self, x: td.Tensor) -> td.Tensor:
        h = td.max_pool(td.relu(self.conv(x)), 2)  # (N, 3, 2, 3)
        h = self.norm(h.reshape(h.shape[0], 3, -1).transpose(1, 2))
        return self.head(self.attend(h, h, h)[0].mean(1))


NET = Net()


def loss_of_one(values: Any, x: td.Tensor, y: td.Tensor) -> td.Tensor:
    return losses.cross_entropy(NET.apply(values, x[None]), y[None])


def batch_of_images(count: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(count, 2, 4, 6), rng.integers(0, 4, count).astype(np.int32)


def test_gradients_per_sample_natively() -> None:
    values = NET.init(0)
    x, y = batch_of_images(5)
    each = td.vmap(td.value_and_grad(loss_of_one), (None, 0, 0))
    found = compiled(each, values, x, y)
    rows = [td.value_and_grad(loss_of_one)(values, x[i], y[i]) for i in range(5)]
    same(found[0], np.stack([row[0] for row in rows]), 1e-5)
    for name, gradient in found[1].items():
        same(gradient, np.stack([row[1][name] for row in rows]), 1e-4)


def natively(w: td.Tensor, xs: td.Tensor, h: td.Tensor, i: td.Tensor) -> Any:
    """What the table's tests do not compile: loops, noise, starts and indices that are data."""
    moved = td.vmap(lambda x, i: td.dynamic_slice(x, [i, 0], (2, 2)), (None, 0))(xs, i)
    written = td.vmap(lambda x, i: td.dynamic_update_slice(x, td.ones((2, 1)), [i, 0]), (None, 0))
    chosen = td.vmap(lambda x, i: x[i], (None, 0))(xs, i)
    loops = td.vmap(td.grad(looped, (0, 1)), (0, None, 0))(w, xs, h)
    return moved, written(xs, i), chosen, loops, td.vmap(noise)(w[:, 0])


def test_loops_noise_and_indices_natively() -> None:
    given = normal(9, 2), normal(5, 2), normal(9, 2), rng.integers(0, 5, 9).astype(np.int32)
    found, oracle = (compiled(natively, *given, device=d) for d in ("cpu", "oracle"))
    same(found, oracle, 1e-5)


@pytest.mark.parametrize("device", ["oracle", pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_mapped_loss_trains_as_the_plain_one(device: str) -> None:
    x, y = batch_of_images(5)
    specs = {"x": td.Spec(x.shape), "y": td.Spec(y.shape, td.int32)}

    def mapped(model: Net, batch: Any) -> td.Tensor:
        each = td.vmap(lambda x, y: losses.cross_entropy(model(x[None]), y[None]))
        return each(batch["x"], batch["y"]).mean()

    def plain(model: Net, batch: Any) -> td.Mean:
        return losses.cross_entropy(model(batch["x"]), batch["y"])

    steps = [td.compile_step(NET, f, optim.sgd(0.5), specs, device=device) for f in (mapped, plain)]
    found = [[step({"x": x, "y": y}).loss for _ in range(3)] for step in steps]
    assert found[0][2] < found[0][0]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_clipped_gradients_of_samples_in_a_step() -> None:
    """Gradients are clipped one by one and summed, as private training does."""
    w, x, y = normal(2, 3), normal(7, 3), normal(7, 2)
    model = {"w": w}

    def one(w: td.Tensor, x: td.Tensor, y: td.Tensor) -> td.Tensor:
        return (x @ w.T - y).square().sum()

    def forward(model: Any, batch: Any) -> td.Tensor:
        return td.vmap(one, (None, 0, 0))(model["w"], batch["x"], batch["y"]).mean()

    def backward(model: Any, batch: Any, _: None) -> Any:
        each = td.vmap(td.grad(one), (None, 0, 0))(model["w"], batch["x"], batch["y"])
        norms = td.sqrt((each * each).sum((1, 2), keepdims=True))
        return {"w": (each * td.minimum(1.0 / norms, 1.0)).mean(0)}

    specs = {"x": td.Spec(x.shape), "y": td.Spec(y.shape)}
    step = td.compile_manual_step(model, forward, backward, optim.sgd(1.0), specs, device="cpu")
    step({"x": x, "y": y})
    each = 2 * (x @ w.T - y)[:, :, None] * x[:, None, :]
    norms = np.sqrt((each**2).sum((1, 2), keepdims=True))
    same(step.params["w"], w - (each * np.minimum(1 / norms, 1)).mean(0), 1e-5)


@pytest.mark.slow
def test_programs_are_rendered_for_cuda() -> None:
    options = td.CompileOptions()
    toolchain = backend("cuda").toolchain(options)
    values = {n: td.Spec(a.shape) for n, a in NET.init(0).items()}
    images, labels = td.Spec((5, 2, 4, 6)), td.Spec((5,), td.int32)
    each = td.trace(td.vmap(td.grad(loss_of_one), (None, 0, 0)), values, images, labels)
    loops = td.trace(
        natively, td.Spec((9, 2)), td.Spec((5, 2)), td.Spec((9, 2)), td.Spec((9,), td.int32)
    )
    for graph in (each, loops):
        program = toolchain.schedule(graph, options)
        assert len(toolchain.render(program).launches) == len(program.distinct())
