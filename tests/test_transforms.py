"""grad, vjp, jvp, custom_vjp, checkpoint, scan, and what leaves a program on the side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import treadle as td
from treadle.base import trees
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import OutputKind
from treadle.ir.verify import verify

rng = np.random.default_rng(0)
W1, B1, W2 = rng.normal(size=(4, 3)), rng.normal(size=4), rng.normal(size=(1, 4))
X = rng.normal(size=(5, 3))
DIRECTIONS = [rng.normal(size=p.shape) for p in (W1, B1, W2)]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, traced, verified and evaluated."""
    graph = verify(td.trace(function, *arguments))
    leaves = [leaf for a in arguments for leaf in trees.flatten(a)[0]]
    return evaluate_float64(graph, dict(zip(graph.leaves, leaves, strict=True)))


def values(tree: Any) -> Any:
    return trees.map_leaves(lambda t: t.numpy(), tree)


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    ours, structure = trees.flatten(found)
    theirs, other = trees.flatten(expected)
    assert structure == other
    for a, b in zip(ours, theirs, strict=True):
        a = a.numpy() if isinstance(a, td.Tensor) else np.asarray(a)
        b = b.detach().numpy() if isinstance(b, torch.Tensor) else np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def eager_and_traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """The eager result, after making sure that the traced one is bitwise the same."""
    found = function(*trees.map_leaves(td.tensor, arguments))
    leaves = [t.numpy() for t in trees.flatten(found)[0]]
    for a, b in zip(leaves, run(function, *arguments), strict=True):
        np.testing.assert_array_equal(a, b)
    return found


# Gradients ---------------------------------------------------------------------------------------


def network(parameters: dict[str, Any], x: Any) -> Any:
    """A small tanh network that PyTorch understands too."""
    tanh = td.tanh if isinstance(x, td.Tensor) else torch.tanh
    hidden = tanh(x @ parameters["w1"].T + parameters["b1"])
    return hidden @ parameters["w2"].T


def network_loss(parameters: dict[str, Any], x: Any) -> Any:
    output = network(parameters, x)
    return (output * output).sum() + (output**3).sum()


PARAMETERS = {"w1": W1, "b1": B1, "w2": W2}


def torch_parameters() -> dict[str, torch.Tensor]:
    return {n: torch.tensor(p, requires_grad=True) for n, p in PARAMETERS.items()}


def test_gradient_of_a_tree() -> None:
    gradient = eager_and_traced(td.grad(network_loss), PARAMETERS, X)
    theirs = torch_parameters()
    network_loss(theirs, torch.tensor(X)).backward()
    close(gradient, {n: p.grad for n, p in theirs.items()})


class Pair(NamedTuple):
    left: Any
    right: Any


TREES: list[Any] = [
    [X[0], X[1]],
    (X[0], {"a": X[1], "b": [X[2]]}),
    Pair(X[0], (X[1],)),
    {"a": X[0], "none": None, "b": X[1]},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: type(t).__name__)
def test_gradients_keep_the_structure(tree: Any) -> None:
    def loss(tree: Any) -> td.Tensor:
        return sum((t * t * (i + 1)).sum() for i, t in enumerate(trees.flatten(tree)[0]))

    leaves, structure = trees.flatten(tree)
    expected = structure.rebuild(2 * x * (i + 1) for i, x in enumerate(leaves))
    close(td.grad(loss)(tree), expected)


def product(x: td.Tensor, y: td.Tensor, z: td.Tensor) -> td.Tensor:
    return (x * y * y * z * z * z).sum()


@pytest.mark.parametrize("argnums", [0, 1, 2, -1, (0,), (0, 2), (2, 1), [1, 0], ()])
def test_argnums(argnums: Any) -> None:
    x, y, z = X[0], X[1], X[2]
    every = (y**2 * z**3, 2 * x * y * z**3, 3 * x * y**2 * z**2)
    found = td.grad(product, argnums)(x, y, z)
    expected = every[argnums] if isinstance(argnums, int) else tuple(every[i] for i in argnums)
    close(found, expected)
    value, gradient = td.value_and_grad(product, argnums)(x, y, z)
    close(value, (x * y**2 * z**3).sum())
    close(gradient, expected)


def test_has_aux() -> None:
    def loss(x: td.Tensor) -> Any:
        return (x * x).sum(), {"double": x * 2, "count": td.tensor(3)}

    x = X[0]
    (value, aux), gradient = td.value_and_grad(loss, has_aux=True)(x)
    close(value, (x * x).sum())
    close(gradient, 2 * x)
    close(aux, {"double": 2 * x, "count": 3})
    gradient, aux = td.grad(loss, has_aux=True)(x)
    close(gradient, 2 * x)
    close(aux["double"], 2 * x)


def test_unreached_arguments_warn_and_give_zeros() -> None:
    def loss(parameters: dict[str, td.Tensor], x: td.Tensor) -> td.Tensor:
        return (parameters["used"] * x).sum()

    parameters = {"used": X[0], "lost": X[1], "integer": {"rounded": X[2]}}
    with pytest.warns(td.UnreachedWarning) as caught:
        gradient = td.grad(loss)(parameters, X[3])
    (message,) = (str(w.message) for w in caught)
    assert "loss does not depend on parameters.lost, parameters.integer.rounded" in message
    assert "[test_transforms.py:" in message
    assert caught[0].filename == __file__
    zeros = np.zeros(3)
    close(gradient, {"used": X[3], "lost": zeros, "integer": {"rounded": zeros}})


@pytest.mark.parametrize("stop", [td.floor, td.sign, td.stop_gradient, td.argmax, lambda x: x > 0])
def test_ops_without_a_gradient_are_not_reached(stop: Callable[..., td.Tensor]) -> None:
    with pytest.warns(td.UnreachedWarning, match="does not depend on x"):
        gradient = td.grad(lambda x: (stop(x) * 2.0).sum())(X[0])
    close(gradient, np.zeros(3))


def test_closures_inside_grad_inside_trace() -> None:
    def outer(x: td.Tensor, y: td.Tensor) -> Any:
        scaled = y * 2
        inner = td.grad(lambda z: (z * z * scaled).sum())(x)
        return (
            inner,
            td.grad(lambda z: (z * inner).sum())(y),
            td.grad(lambda z: (z * z).sum())(X[2]),
        )

    first, second, third = run(outer, X[0], X[1])
    close(first, 4 * X[0] * X[1])
    close(second, first)
    close(third, 2 * X[2])


def test_gradient_of_a_gradients_closure() -> None:
    def outer(y: td.Tensor) -> td.Tensor:
        return td.grad(lambda z: (z * z * y * y).sum())(td.tensor(X[0])).sum()

    close(eager_and_traced(td.grad(outer), X[1]), 4 * X[0] * X[1])


# vjp and jvp -------------------------------------------------------------------------------------


def several(x: td.Tensor, pair: tuple[td.Tensor, td.Tensor]) -> dict[str, td.Tensor]:
    return {"a": x @ pair[0], "b": td.sin(x) * pair[1], "index": td.argmax(x, 0)}


def torch_several(x: Any, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ a, torch.sin(x) * b


def test_vjp_as_torch() -> None:
    a, b = rng.normal(size=(3, 2)), rng.normal(size=(5, 3))
    cts = rng.normal(size=(5, 2)), rng.normal(size=(5, 3))

    def pulled(x: Any, pair: Any, ct_a: Any, ct_b: Any) -> Any:
        result, pull = td.vjp(several, x, pair)
        return result, pull({"a": ct_a, "b": ct_b, "index": td.zeros((3,), td.int32)})

    result, gradients = eager_and_traced(pulled, X, (a, b), *cts)
    inputs = tuple(torch.tensor(t) for t in (X, a, b))
    outputs, theirs = torch.autograd.functional.vjp(
        torch_several, inputs, tuple(torch.tensor(c) for c in cts)
    )
    close((result["a"], result["b"]), outputs)
    close(gradients, (theirs[0], (theirs[1], theirs[2])))


def test_vjp_pulls_more_than_once() -> None:
    _, pull = td.vjp(lambda x: x * x, X)
    close(pull(np.ones_like(X)), (2 * X,))
    close(pull(X), (2 * X * X,))


def test_vjp_of_an_unreached_argument_is_zero() -> None:
    _, pull = td.vjp(lambda x, i: x * 2, X, np.arange(3))
    close(pull(X), (2 * X, np.zeros(3, int)))


def test_jvp_as_torch() -> None:
    a, b = rng.normal(size=(3, 2)), rng.normal(size=(5, 3))
    moves = rng.normal(size=X.shape), rng.normal(size=a.shape), rng.normal(size=b.shape)

    def pushed(x: Any, pair: Any, dx: Any, da: Any, db: Any) -> Any:
        return td.jvp(several, (x, pair), (dx, (da, db)))

    result, slopes = eager_and_traced(pushed, X, (a, b), *moves)
    inputs = tuple(torch.tensor(t) for t in (X, a, b))
    outputs, theirs = torch.autograd.functional.jvp(
        torch_several, inputs, tuple(torch.tensor(m) for m in moves)
    )
    close((result["a"], result["b"]), outputs)
    close((slopes["a"], slopes["b"]), theirs)
    close(slopes["index"], np.zeros(3, int))


def test_jvp_ignores_tangents_of_integers() -> None:
    index = np.array([2, 0])
    _, slope = td.jvp(lambda x, i: x[i] * 2, (X[0], index), (X[1], index))
    close(slope, 2 * X[1][index])


def test_forward_and_reverse_agree() -> None:
    """⟨ct, J v⟩ = ⟨Jᵀ ct, v⟩"""
    v, ct = rng.normal(size=X.shape), rng.normal(size=(5, 3))

    def function(x: td.Tensor) -> td.Tensor:
        return td.softmax(td.tanh(x @ W1.T) @ W1) * td.logsumexp(x, -1, keepdims=True)

    _, push = td.jvp(function, (X,), (v,))
    (pulled,) = td.vjp(function, X)[1](ct)
    close((ct * push.numpy()).sum(), (pulled.numpy() * v).sum())


# Second derivatives ------------------------------------------------------------------------------


def entropy(x: td.Tensor) -> td.Tensor:
    return -(td.softmax(x) * td.log_softmax(x)).sum()


def torch_entropy(x: torch.Tensor) -> torch.Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum()


CLOSED: list[tuple[str, Callable[..., td.Tensor], Callable[..., Any], Callable[..., Any]]] = [
    ("x⁵", lambda x: x**5, lambda x: 20 * x**3, lambda x: 60 * x**2),
    ("x³", lambda x: x**3, lambda x: 6 * x, lambda x: 6 + 0 * x),
    ("sin", td.sin, lambda x: -np.sin(x), lambda x: -np.cos(x)),
    ("exp", td.exp, np.exp, np.exp),
    ("log", td.log, lambda x: -1 / x**2, lambda x: 2 / x**3),
    ("1/x", td.reciprocal, lambda x: 2 / x**3, lambda x: -6 / x**4),
    ("√x", td.sqrt, lambda x: -0.25 * x**-1.5, lambda x: 0.375 * x**-2.5),
]


@pytest.mark.parametrize(("function", "second", "third"), [c[1:] for c in CLOSED], ids=lambda _: "")
def test_repeated_derivatives(
    function: Callable[..., Any], second: Callable[..., Any], third: Callable[..., Any]
) -> None:
    x = 0.8
    twice = td.grad(td.grad(function))
    close(eager_and_traced(twice, np.array(x)), second(x))
    close(eager_and_traced(td.grad(twice), np.array(x)), third(x))


def test_hessian_of_the_softmax_entropy() -> None:
    x = X[0]
    rows = [
        eager_and_traced(td.grad(lambda x, i=i: td.grad(entropy)(x)[i]), x).numpy()
        for i in range(3)
    ]
    theirs = torch.autograd.functional.hessian(torch_entropy, torch.tensor(x))
    close(np.stack(rows), theirs)


def torch_hvp() -> dict[str, torch.Tensor]:
    theirs = torch_parameters()
    loss = network_loss(theirs, torch.tensor(X))
    first = torch.autograd.grad(loss, list(theirs.values()), create_graph=True)
    along = sum((g * torch.tensor(d)).sum() for g, d in zip(first, DIRECTIONS, strict=True))
    return dict(zip(theirs, torch.autograd.grad(along, list(theirs.values())), strict=True))


def forward_over_reverse(parameters: Any, x: Any) -> Any:
    directions = dict(zip(parameters, DIRECTIONS, strict=True))
    gradient = td.grad(lambda p: network_loss(p, x))
    return td.jvp(gradient, (parameters,), (directions,))[1]


def reverse_over_reverse(parameters: Any, x: Any) -> Any:
    def along(p: Any) -> td.Tensor:
        gradient = td.grad(network_loss)(p, x)
        return sum((g * d).sum() for g, d in zip(gradient.values(), DIRECTIONS, strict=True))

    return td.grad(along)(parameters)


def reverse_over_forward(parameters: Any, x: Any) -> Any:
    directions = dict(zip(parameters, DIRECTIONS, strict=True))

    def slope(p: Any) -> td.Tensor:
        return td.jvp(lambda p: network_loss(p, x), (p,), (directions,))[1]

    return td.grad(slope)(parameters)


@pytest.mark.parametrize("way", [forward_over_reverse, reverse_over_reverse, reverse_over_forward])
def test_hessian_vector_product_as_torch(way: Callable[..., Any]) -> None:
    close(eager_and_traced(way, PARAMETERS, X), torch_hvp(), 1e-9)


def test_gradient_penalty_as_torch() -> None:
    def penalty(parameters: Any, x: Any) -> td.Tensor:
        slope = td.grad(lambda x: network(parameters, x).sum())(x)
        norms = td.norm(slope, axis=-1)
        return network(parameters, x).mean() + ((norms - 1) ** 2).mean() * 10

    value, gradient = eager_and_traced(td.value_and_grad(penalty), PARAMETERS, X)
    theirs, x = torch_parameters(), torch.tensor(X, requires_grad=True)
    (slope,) = torch.autograd.grad(network(theirs, x).sum(), x, create_graph=True)
    loss = network(theirs, x).mean() + ((slope.norm(dim=-1) - 1) ** 2).mean() * 10
    loss.backward()
    close(value, loss, 1e-9)
    close(gradient, {n: p.grad for n, p in theirs.items()}, 1e-9)


# custom_vjp --------------------------------------------------------------------------------------


def wrong(x: td.Tensor) -> td.Tensor:
    """sin with a derivative that is wrong by design: x³."""
    return td.custom_vjp(td.sin, lambda ct, out, x: (ct * x * x * x,))(x)


def test_custom_vjp_is_used() -> None:
    x = X[0]
    close(eager_and_traced(wrong, x), np.sin(x))
    close(eager_and_traced(td.grad(lambda x: wrong(x).sum()), x), x**3)
    close(td.grad(lambda x: (wrong(x * 2) * 5).sum())(x), 10 * (2 * x) ** 3)


def test_second_derivative_goes_through_the_users_backward() -> None:
    x = np.array(0.7)
    close(eager_and_traced(td.grad(td.grad(wrong)), x), 3 * x**2)
    close(eager_and_traced(td.grad(td.grad(td.grad(wrong))), x), 6 * x)


def test_backward_sees_the_result() -> None:
    calls: list[int] = []

    def backward(ct: Any, out: Any, x: Any) -> Any:
        calls.append(1)
        return (ct * out,)

    function = td.custom_vjp(td.exp, backward)
    close(td.grad(lambda x: function(x).sum())(X[0]), np.exp(X[0]))
    close(td.grad(td.grad(function))(0.5), np.exp(np.float32(0.5)), 1e-6)
    assert calls


def test_custom_vjp_of_trees() -> None:
    def forward(p: dict[str, Any], i: Any, y: Any) -> Any:
        return p["a"][i] * y, p["b"]

    def backward(ct: Any, out: Any, p: Any, i: Any, y: Any) -> Any:
        return {"a": p["a"] * 0 + 7, "b": ct[1] * 3}, None, ct[0] * out[0]

    def loss(p: Any, y: Any) -> td.Tensor:
        first, second = td.custom_vjp(forward, backward)(p, td.tensor([0, 2]), y)
        return (first * 2).sum() + second.sum()

    p, y = {"a": X[0], "b": X[1]}, rng.normal(size=2)
    gradient, dy = td.grad(loss, (0, 1))(p, y)
    close(gradient, {"a": np.full(3, 7.0), "b": np.full(3, 3.0)})
    close(dy, 2 * X[0][[0, 2]] * y)


def test_custom_vjp_with_one_result_used() -> None:
    """The cotangent of a result that nothing uses is zero."""
    function = td.custom_vjp(lambda x: (x * 2, x * 3), lambda ct, out, x: (ct[0] * 10 + ct[1],))
    close(td.grad(lambda x: function(x)[0].sum())(X[0]), np.full(3, 10.0))
    close(td.grad(lambda x: function(x)[1].sum())(X[0]), np.ones(3))


def test_straight_through() -> None:
    rounded = td.custom_vjp(td.round, lambda ct, out, x: (ct,))
    close(td.grad(lambda x: (rounded(x) * X[1]).sum())(X[0]), X[1])


# checkpoint --------------------------------------------------------------------------------------


def deep(x: td.Tensor, w: td.Tensor, wrap: Callable[..., Any]) -> td.Tensor:
    for _ in range(3):
        x = wrap(lambda x, w: td.tanh(x @ w) * td.sigmoid(x))(x, w)
    return (x * x).sum()


@pytest.mark.parametrize("order", [1, 2])
def test_checkpoint_changes_nothing(order: int) -> None:
    x, w = X[:3], rng.normal(size=(3, 3))

    def derivative(wrap: Callable[..., Any]) -> Callable[..., Any]:
        function = td.grad(lambda x, w: deep(x, w, wrap), (0, 1))
        if order == 1:
            return function
        return td.grad(lambda x, w: sum((g * g).sum() for g in function(x, w)), (0, 1))

    plain = eager_and_traced(derivative(lambda f: f), x, w)
    kept = eager_and_traced(derivative(td.checkpoint), x, w)
    close(kept, plain)


def test_checkpoint_recomputes() -> None:
    graph = td.trace(td.grad(lambda x: deep(x, td.tensor(np.eye(3)), td.checkpoint)), X)
    calls = [n.attributes for n in graph.nodes if n.op.name == "call"]
    assert len(calls) == 6  # three forward, three backward
    assert all(c.recompute for c in calls)


def test_checkpoint_with_outer_tensors_and_trees() -> None:
    def loss(x: td.Tensor, w: td.Tensor) -> td.Tensor:
        scaled = w * 2
        result = td.checkpoint(lambda p: {"y": p["x"] * scaled, "z": p["x"]})({"x": x})
        return (result["y"] * result["z"]).sum()

    close(eager_and_traced(td.grad(loss, (0, 1)), X[0], X[1]), (4 * X[0] * X[1], 2 * X[0] ** 2))


# scan --------------------------------------------------------------------------------------------


def scan_by_hand(body: Callable[..., Any], carry: Any, xs: Any, reverse: bool) -> Any:
    order = range(len(xs))
    outputs = {}
    for i in reversed(order) if reverse else order:
        carry, outputs[i] = body(carry, xs[i])
    return carry, td.stack([outputs[i] for i in order])


def mixing(carry: Any, x: td.Tensor) -> Any:
    total, scale = carry
    return (total * 0.5 + td.sin(x * scale), scale * 1.1), total * x


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_scan_as_a_loop(reverse: bool, recompute: bool) -> None:
    def loss(first: Any, scale: Any, xs: Any, scan: Callable[..., Any]) -> Any:
        (total, scale), ys = scan(mixing, (first, scale), xs)
        return (total * X[1]).sum() + scale.sum() + (ys * ys).sum()

    def scanned(*arguments: Any) -> Any:
        def scan(*a: Any) -> Any:
            return td.scan(*a, reverse=reverse, recompute=recompute)

        return loss(*arguments, scan)

    def looped(*arguments: Any) -> Any:
        return loss(*arguments, lambda f, c, xs: scan_by_hand(f, c, xs, reverse))

    arguments = X[0], X[2], X
    close(eager_and_traced(scanned, *arguments), looped(*map(td.tensor, arguments)))
    gradients = td.grad(scanned, (0, 1, 2)), td.grad(looped, (0, 1, 2))
    close(eager_and_traced(gradients[0], *arguments), gradients[1](*arguments))
    for argument in range(3):  # and again, through the gradient
        second = (
            td.grad(lambda *a, g=g, i=argument: (g(*a)[i] ** 2).sum(), (0, 1, 2)) for g in gradients
        )
        ours, theirs = (g(*arguments) for g in second)
        close(ours, theirs, 1e-10)


def test_saving_and_recomputing_are_equal() -> None:
    def gradient(recompute: bool) -> Any:
        def loss(first: Any, scale: Any, xs: Any) -> Any:
            (total, _), ys = td.scan(mixing, (first, scale), xs, recompute=recompute)
            return (total * total).sum() + ys.sum()

        return run(td.grad(loss, (0, 1, 2)), X[0], X[2], X)

    for saved, recomputed in zip(gradient(False), gradient(True), strict=True):
        np.testing.assert_array_equal(saved, recomputed)


def test_scan_without_xs() -> None:
    def powers(x: td.Tensor) -> Any:
        return td.scan(lambda c, _: (c * x, c), td.ones((), td.float64), length=4)

    last, ys = eager_and_traced(powers, np.array(3.0))
    close((last, ys), (81.0, np.array([1.0, 3.0, 9.0, 27.0])))
    close(td.grad(lambda x: powers(x)[0])(np.array(3.0)), 4 * 3.0**3)


def test_scan_without_ys_or_carry() -> None:
    def total(x: td.Tensor) -> Any:
        return td.scan(lambda c, x: (c + x, None), td.zeros((3,), td.float64), x)

    last, ys = eager_and_traced(total, X)
    close(last, X.sum(0))
    assert ys is None
    carry, doubled = td.scan(lambda c, x: (None, x * 2), None, X)
    assert carry is None
    close(doubled, X * 2)
    traced = run(lambda x: td.scan(lambda c, x: (None, x * 2), None, x), X)
    close(traced[0], X * 2)


def test_traced_scan_of_no_steps() -> None:
    last, ys = run(lambda c, x: td.scan(lambda c, x: (c + x, c * x), c, x), X[0], np.zeros((0, 3)))
    close(last, X[0])
    assert ys.shape == (0, 3)
    (gradient,) = run(
        td.grad(lambda c, x: td.scan(lambda c, x: (c * x, c), c, x)[0].sum()),
        X[0],
        np.zeros((0, 3)),
    )
    close(gradient, np.ones(3))


def test_scan_over_trees_with_outer_tensors() -> None:
    def loss(w: td.Tensor, xs: dict[str, td.Tensor]) -> td.Tensor:
        shared = td.tanh(w)

        def body(carry: dict[str, td.Tensor], x: dict[str, td.Tensor]) -> Any:
            new = {"a": carry["a"] + x["p"] * shared, "b": carry["b"] * 0.5 + x["q"]}
            return new, (new["a"] * w, {"b": new["b"]})

        start = {"a": td.zeros((3,), td.float64), "b": td.ones((3,), td.float64)}
        last, (ya, yb) = td.scan(body, start, xs)
        return (last["a"] ** 2).sum() + (ya * yb["b"]).sum()

    def by_hand(w: Any, xs: Any) -> Any:
        a, b, total = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.0
        for p, q in zip(xs["p"], xs["q"], strict=True):
            a, b = a + p * torch.tanh(w), b * 0.5 + q
            total = total + (a * w * b).sum()
        return (a**2).sum() + total

    xs = {"p": X, "q": X[::-1].copy()}
    gradient = eager_and_traced(td.grad(loss, (0, 1)), X[0], xs)
    w = torch.tensor(X[0], requires_grad=True)
    theirs = {n: torch.tensor(x, requires_grad=True) for n, x in xs.items()}
    by_hand(w, theirs).backward()
    close(gradient, (w.grad, {n: x.grad for n, x in theirs.items()}))


def lstm(parameters: dict[str, Any], xs: Any) -> td.Tensor:
    hidden = parameters["weight_hh"].shape[1]

    def cell(state: Any, x: td.Tensor) -> Any:
        h, c = state
        gates = td.linear(x, parameters["weight_ih"], parameters["bias_ih"])
        gates = gates + td.linear(h, parameters["weight_hh"], parameters["bias_hh"])
        i, f, g, o = td.chunk(gates, 4, -1)
        c = td.sigmoid(f) * c + td.sigmoid(i) * td.tanh(g)
        h = td.sigmoid(o) * td.tanh(c)
        return (h, c), h

    zeros = td.zeros((xs.shape[1], hidden), td.float64)
    (h, c), ys = td.scan(cell, (zeros, zeros), xs)
    return (ys**2).sum() + (h * c).sum()


def test_lstm_as_torch() -> None:
    cell = torch.nn.LSTM(3, 4).double()
    parameters = {n.removesuffix("_l0"): p.detach().numpy() for n, p in cell.named_parameters()}
    xs = rng.normal(size=(6, 2, 3))
    value, gradient = eager_and_traced(td.value_and_grad(lstm), parameters, xs)
    ys, (h, c) = cell(torch.tensor(xs))
    loss = (ys**2).sum() + (h * c).sum()
    loss.backward()
    close(value, loss, 1e-10)
    theirs = {n.removesuffix("_l0"): p.grad for n, p in cell.named_parameters()}
    close(gradient, theirs, 1e-10)


@pytest.mark.parametrize("recompute", [False, True])
def test_nested_scan(recompute: bool) -> None:
    def nested(w: Any, xs: Any) -> Any:
        def outer(c: Any, row: Any) -> Any:
            return td.scan(
                lambda c, x: (td.tanh(c * w + x), c * x), c, row, reverse=True, recompute=recompute
            )

        last, ys = td.scan(outer, td.ones((), td.float64), xs, recompute=recompute)
        return last + (ys * ys).sum()

    def loops(w: Any, xs: Any) -> Any:
        c, total = td.ones((), td.float64), 0.0
        for row in xs:
            for x in reversed(list(row)):
                c, y = td.tanh(c * w + x), c * x
                total = total + y * y
        return c + total

    w = np.array(0.4)
    close(eager_and_traced(nested, w, X), loops(td.tensor(w), td.tensor(X)))
    close(eager_and_traced(td.grad(nested, (0, 1)), w, X), td.grad(loops, (0, 1))(w, X))
    second = (td.grad(td.grad(f)) for f in (nested, loops))
    ours, theirs = (g(w, X) for g in second)
    close(ours, theirs)


def test_jvp_through_scan() -> None:
    def function(first: Any, scale: Any, xs: Any, scan: Callable[..., Any]) -> Any:
        (total, _), ys = scan(mixing, (first, scale), xs)
        return total, ys

    def pushed(scan: Callable[..., Any]) -> Callable[..., Any]:
        def push(*arguments: Any) -> Any:
            moves = tuple(np.cos(np.arange(a.size).reshape(a.shape)) for a in (X[0], X[2], X))
            return td.jvp(lambda *a: function(*a, scan), arguments, moves)

        return push

    loop = pushed(lambda f, c, xs: scan_by_hand(f, c, xs, False))
    arguments = X[0], X[2], X
    close(eager_and_traced(pushed(td.scan), *arguments), loop(*map(td.tensor, arguments)))


def test_forward_over_reverse_through_scan() -> None:
    def loss(x: Any, scan: Callable[..., Any]) -> Any:
        (total, _), ys = scan(mixing, (x, x * 0.5), td.tensor(X))
        return (total**2).sum() + ys.sum()

    def along(scan: Callable[..., Any]) -> Callable[..., Any]:
        gradient = td.grad(lambda x: loss(x, scan))
        return lambda x: td.jvp(gradient, (x,), (X[3],))[1]

    ours = eager_and_traced(along(td.scan), X[0])
    close(ours, along(lambda f, c, xs: scan_by_hand(f, c, xs, False))(td.tensor(X[0])))


def test_only_part_of_a_scan_is_differentiated() -> None:
    """Carries and rows without a gradient, integers among them."""

    def loss(x: Any, xs: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            count, total, constant = carry
            return (count + 1, total + x * row * count, constant * 2), (total, count)

        start = td.tensor(0), td.zeros((3,), td.float64), td.ones((), td.float64)
        (count, total, constant), (ys, counts) = td.scan(body, start, xs)
        return (total * constant).sum() + ys.sum() + count * 2.0 + counts.sum()

    expected = sum(X[i] * i for i in range(5)) * 32
    expected = expected + sum(X[i] * i * (4 - i) for i in range(5))
    close(eager_and_traced(td.grad(loss), X[0], X), expected)


FLAT: dict[str, Callable[[Any], Any]] = {
    "vjp": lambda x: td.vjp(td.floor, x)[1](x)[0],
    "checkpoint": td.grad(lambda x: sum(td.checkpoint(lambda x: (x, td.floor(x)))(x)).sum() - x[0]),
    "scan": td.grad(lambda x: td.scan(lambda c, r: (c, td.sign(c * r)), x, X)[1].sum() + 0 * x[0]),
}


@pytest.mark.parametrize("way", FLAT)
def test_results_without_a_gradient(way: str) -> None:
    expected = {"vjp": [0, 0, 0], "checkpoint": [0, 1, 1], "scan": [0, 0, 0]}[way]
    close(FLAT[way](td.tensor(X[0])), np.array(expected))


# Each body is plain arithmetic, wrapped in a way that must not change its derivatives.
def cube(x: Any) -> Any:
    return x * x * x


WRAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "custom_vjp": lambda c, x: td.custom_vjp(cube, lambda ct, out, x: (ct * x * x * 3,))(c) * x,
    "checkpoint": lambda c, x: td.checkpoint(cube)(c) * x,
    "grad": lambda c, x: td.grad(lambda c: (cube(c) * c * 0.25).sum())(c) * x,
    "vjp": lambda c, x: td.vjp(lambda c: cube(c) * c * 0.25, c)[1](td.ones_like(c))[0] * x,
    "jvp": lambda c, x: td.jvp(lambda c: cube(c) * c * 0.25, (c,), (td.ones_like(c),))[1] * x,
    "scan": lambda c, x: td.scan(lambda a, _: (a * c, None), c, length=2)[0] * x,
    "carry as y": lambda c, x: td.scan(lambda a, b: (a * b, a), c * c, c[None])[0] * x,
    "where": lambda c, x: td.where(c > 9, 0, cube(c)) * x,
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("recompute", [False, True])
def test_transforms_inside_scan(name: str, recompute: bool) -> None:
    def loss(step: Callable[..., Any], scan: Callable[..., Any], x: Any) -> Any:
        def body(c: Any, row: Any) -> Any:
            return td.tanh(step(c, row)), c

        last, ys = scan(body, x, td.tensor(X))
        return (last * last).sum() + (ys * X).sum()

    def scanned(x: Any) -> Any:
        return loss(WRAPPED[name], lambda *a: td.scan(*a, recompute=recompute), x)

    def looped(x: Any) -> Any:
        return loss(lambda c, x: cube(c) * x, lambda f, c, xs: scan_by_hand(f, c, xs, False), x)

    close(eager_and_traced(td.grad(scanned), X[0]), td.grad(looped)(X[0]))
    second = (td.grad(lambda x, f=f: (td.grad(f)(x) * X[1]).sum()) for f in (scanned, looped))
    ours, theirs = (g(X[0]) for g in second)
    close(ours, theirs, 1e-10)


# Captures, metrics and prints --------------------------------------------------------------------


def effects(function: Callable[..., Any], *arguments: Any) -> dict[tuple[str, str], np.ndarray]:
    """What leaves a traced function beside its results, by kind and name."""
    graph = verify(td.trace(function, *arguments))
    leaves = [leaf for a in arguments for leaf in trees.flatten(a)[0]]
    found = evaluate_float64(graph, dict(zip(graph.leaves, leaves, strict=True)))
    return {
        (o.kind.value, o.name): v
        for o, v in zip(graph.outputs, found, strict=True)
        if o.kind is not OutputKind.RESULT
    }


def noted(x: td.Tensor) -> td.Tensor:
    hidden = td.capture("hidden", x * 2)
    td.metric("mean", hidden.mean(), weight=3)
    td.debug_print("hidden {}", hidden)
    return (hidden * hidden).sum()


EXPECTED = {
    ("capture", "hidden"): X[0] * 2,
    ("metric", "mean"): X[0].mean() * 2,
    ("weight", "mean"): 3,
    ("print", "hidden {}"): X[0] * 2,
}
WAYS: dict[str, Callable[..., Any]] = {
    "trace": noted,
    "grad": td.grad(noted),
    "value_and_grad": td.value_and_grad(noted),
    "grad of grad": td.grad(lambda x: td.grad(noted)(x).sum()),
    "checkpoint": td.checkpoint(noted),
    "grad of checkpoint": td.grad(td.checkpoint(noted)),
    "checkpoint of grad": td.checkpoint(td.grad(noted)),
    "vjp": lambda x: td.vjp(noted, x)[1](np.ones(())),
    "jvp": lambda x: td.jvp(noted, (x,), (x,)),
    "custom_vjp": lambda x: td.custom_vjp(noted, lambda ct, out, x: (ct * x,))(x),
    "grad of custom_vjp": td.grad(td.custom_vjp(noted, lambda ct, out, x: (ct * x,))),
}


@pytest.mark.parametrize("way", WAYS)
def test_effects(way: str) -> None:
    found = effects(WAYS[way], X[0])
    assert list(found) == list(EXPECTED)
    for key, value in EXPECTED.items():
        close(found[key], value)


def noted_scan(xs: td.Tensor) -> td.Tensor:
    def body(carry: td.Tensor, x: td.Tensor) -> Any:
        carry = td.capture("carry", carry + x)
        td.metric("mean", x.mean(), weight=x.max() ** 2)
        td.metric("count", td.argmax(x), weight=0.5)
        td.debug_print("{}", x.sum())
        return carry, carry * 2

    last, _ = td.scan(body, td.zeros((3,), td.float64), xs)
    return (last * last).sum()


@pytest.mark.parametrize(
    "wrap", [lambda f: f, td.grad, td.checkpoint, lambda f: td.grad(td.checkpoint(f))]
)
def test_effects_of_a_scan(wrap: Callable[..., Any]) -> None:
    found = effects(wrap(noted_scan), X)
    weights = X.max(1) ** 2
    close(found["capture", "carry"], X.cumsum(0))
    close(found["metric", "mean"], (X.mean(1) * weights).sum() / weights.sum())
    close(found["weight", "mean"], weights.sum())
    close(found["metric", "count"], X.argmax(1).mean())
    close(found["weight", "count"], 2.5)
    close(found["print", "{}"], X.sum(1))
    assert len(found) == 6


def test_captures_of_nested_scans_are_stacked_twice() -> None:
    def inner(c: Any, x: Any) -> Any:
        return c + td.capture("x", x), None

    def function(xs: td.Tensor) -> td.Tensor:
        return td.scan(lambda c, row: td.scan(inner, c, row), td.zeros((), td.float64), xs)[0]

    close(effects(function, X)["capture", "x"], X)


def test_effects_of_the_eager_scope(capsys: pytest.CaptureFixture[str]) -> None:
    x = td.tensor([1.0, 2.0])
    assert td.capture("x", x) is x
    assert td.metric("m", 2.0).item() == 2.0
    td.debug_print("x = {}", x)
    assert capsys.readouterr().out == "x = [1. 2.]\n"


def test_prints_of_an_eager_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(x: td.Tensor) -> td.Tensor:
        td.debug_print("x = {}", x)
        return (x * x).sum()

    td.grad(loss)(td.tensor([1.0, 2.0]))
    assert capsys.readouterr().out == "x = [1. 2.]\n"
