"""`cond`, `while_loop` and `associative_scan`: values, gradients, refusals, natively."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from treadle import nn, optim
from treadle.base import trees

rng = np.random.default_rng(8)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def near(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    found = ours.numpy() if isinstance(ours, td.Tensor) else np.asarray(ours)
    np.testing.assert_allclose(found, np.asarray(theirs), tolerance, tolerance)


# Each is √x above 0 and 3x elsewhere; its slope at 0 is that of 3x.
def of_operands(x: td.Tensor) -> td.Tensor:
    return td.cond(x > 0, lambda y: td.sqrt(y), lambda y: y * 3, x)


def of_closures(x: td.Tensor) -> td.Tensor:
    return td.cond(x > 0, lambda: td.sqrt(x), lambda: x * 3)


def of_closures_further_in(x: td.Tensor) -> td.Tensor:
    """The square root is taken in a trace inside the branch, of a tensor from outside of it."""

    def branch() -> td.Tensor:
        inner = td.vmap(lambda one: td.sqrt(x) * one)
        return td.checkpoint(lambda: inner(td.ones((1,))).sum())()

    return td.cond(x > 0, branch, lambda: x * 3)


def of_trees(x: td.Tensor) -> td.Tensor:
    pair = td.cond(
        x > 0,
        lambda t: {"a": td.sqrt(t[0]), "b": t[1]},
        lambda t: {"a": t[0], "b": t[1] * 3},
        (x, x),
    )
    return td.cond(x > 0, lambda: pair["a"], lambda: pair["b"])


def of_nested(x: td.Tensor) -> td.Tensor:
    positive = lambda: td.cond(x > 5, lambda: td.log(x - 5), lambda: td.sqrt(x))  # noqa: E731
    return td.cond(x > 0, positive, lambda: x * 3)


CONDITIONS = [of_operands, of_closures, of_closures_further_in, of_trees, of_nested]
AT = np.array([4.0, 0.25, 0.0, -1.0], np.float32)
VALUES, SLOPES = [2, 0.5, 0, -3], [0.25, 1, 3, 3]


@pytest.mark.parametrize("function", CONDITIONS)
def test_a_branch_not_taken_leaves_no_trace_in_gradients(function: Any) -> None:
    for x, value, slope in zip(AT, VALUES, SLOPES, strict=True):
        near(function(td.tensor(x)), value)
        near(td.grad(function)(x), slope)
    near(td.vmap(function)(AT), VALUES)
    near(td.vmap(td.grad(function))(AT), SLOPES)
    near(td.grad(lambda x: td.vmap(function)(x).sum())(AT), SLOPES)
    near(td.jvp(td.vmap(function), [AT], [np.ones_like(AT)])[1], SLOPES)


def test_second_derivatives() -> None:
    near(td.vmap(td.grad(td.grad(of_closures)))(AT), [-1 / 32, -2, 0, 0])


def test_what_is_known_chooses_when_it_is_traced() -> None:
    def wrong() -> td.Tensor:
        raise AssertionError("this function is not taken")

    near(td.cond(True, lambda: td.tensor(1.0), wrong), 1)
    near(td.cond(np.bool_(False), wrong, lambda: td.tensor(2.0)), 2)
    near(td.cond(td.tensor(3.0) > 2, lambda x: x, lambda x: wrong(), 5.0), 5)
    flag = td.tensor(False)
    near(td.grad(lambda x: td.cond(flag, wrong, lambda: x * 2))(1.0), 2)


def test_both_branches_draw_and_report() -> None:
    def function(x: td.Tensor) -> td.Tensor:
        first = lambda: td.capture("first", td.random.uniform((2,)))  # noqa: E731
        second = lambda: td.capture("second", td.random.uniform((2,)))  # noqa: E731
        return td.cond(x > 0, first, second)

    graph = td.trace(function, td.Spec(()))
    assert [o.name for o in graph.outputs] == ["0", "first", "second"]
    assert sum(n.op.name == "random_bits" for n in graph.nodes) == 2


ONE = np.float32(1)


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (lambda: td.grad(lambda x: td.cond(x, lambda: x, lambda: x))(ONE),
         td.DTypeError, ("float32[]", "not bool", "x != 0")),
        (lambda: td.cond(td.ones((2,)) > 0, lambda: 1, lambda: 2),
         td.ShapeError, ("bool[2]", "td.where", ".all()")),
        (lambda: td.grad(lambda x: td.cond(x > 0, lambda: (x, x), lambda: x))(ONE),
         td.ArgumentError, ("true_fn returns (0, 1) and false_fn 0",)),
        (lambda: td.grad(lambda x: td.cond(x > 0, lambda: x, lambda: 1))(ONE),
         td.DTypeError, ("result 0 is float32[] from true_fn and int32[] from false_fn",)),
        (lambda: td.grad(lambda x: td.cond(x > 0, lambda: x, lambda: td.zeros((2,))))(ONE),
         td.ShapeError, ("float32[] from true_fn and float32[2]", "expand")),
    ],
)  # fmt: skip
def test_refusals_of_cond(call: Any, error: Any, fragments: tuple[str, ...]) -> None:
    refused(call, error, "cond", *fragments)


def test_a_state_is_not_updated_on_a_condition() -> None:
    layer = nn.BatchNorm1d(3)
    loss = lambda m, b: td.cond(b["x"].sum() > 0, lambda: m(b["x"]).sum(), lambda: 0.0)  # noqa: E731
    with pytest.raises(td.TraceError, match="updated inside td.cond.*Return the new value"):
        td.compile_step(layer, loss, optim.sgd(0.1), {"x": td.Spec((4, 3))}, device="oracle")


def root(a: Any) -> Any:
    """√a by Newton's iteration, and how many there were."""
    return td.while_loop(
        lambda s: abs(s[1] * s[1] - a) > 1e-3 * a,
        lambda s: (s[0] + 1, (s[1] + a / s[1]) * 0.5),
        (0, a),
        max_iterations=12,
    )


def expected_root(a: float) -> tuple[int, float, float]:
    """Iterations, value and slope of the iterations that there are."""
    start = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    x, count = start, 0
    while count < 12 and abs(x.detach().item() ** 2 - a) > 1e-3 * a:
        x, count = (x + start / x) * 0.5, count + 1
    (slope,) = torch.autograd.grad(x, start)
    return count, float(x.detach()), float(slope)


def test_a_loop_runs_until_its_condition_is_false() -> None:
    given = np.array([2.0, 9.0, 1.0, 100.0], np.float32)
    counts, values, slopes = np.array([expected_root(float(a)) for a in given]).T
    assert len(set(counts)) == 4
    for i, a in enumerate(given):
        count, value = root(td.tensor(a))
        assert count.item() == counts[i]
        near(value, values[i])
        near(td.grad(lambda a: root(a)[1])(a), slopes[i], 1e-4)
    mapped = td.vmap(root)(given)
    assert (mapped[0].numpy() == counts).all()
    near(mapped[1], values)
    near(td.vmap(td.grad(lambda a: root(a)[1]))(given), slopes, 1e-4)


def drained(x: td.Tensor, c: td.Tensor) -> td.Tensor:
    """x − √c until it is not above 0: where it never runs, √c may have no slope."""
    return td.while_loop(lambda s: s > 0, lambda s: s - td.sqrt(c), x, max_iterations=4)


def shrunk(x: td.Tensor, c: td.Tensor) -> td.Tensor:
    """√(x − c) while x is above c: at the last state the body has no value."""
    return td.while_loop(lambda s: s > c, lambda s: td.sqrt(s - c), x, max_iterations=6)


@pytest.mark.parametrize(
    ("function", "x", "c", "value", "slopes"),
    [
        (drained, 4.0, 4.0, 0.0, (1, -0.5)),  # two iterations
        (drained, -1.0, 0.0, -1.0, (1, 0)),  # none
        (drained, 9.0, 1.0, 5.0, (1, -2)),  # as many as there may be
        (shrunk, 0.75, 0.5, 0.5, (1, -1)),
        (shrunk, 0.5, 0.5, 0.5, (1, 0)),
        (shrunk, 0.6, 0.5, math.sqrt(0.1), (0.5 / math.sqrt(0.1), -0.5 / math.sqrt(0.1))),
    ],
)
def test_what_the_body_gives_elsewhere_is_dropped(
    function: Any, x: float, c: float, value: float, slopes: Any
) -> None:
    x, c = np.float32(x), np.float32(c)
    near(function(td.tensor(x), td.tensor(c)), value, 1e-4)
    found, gradient = td.value_and_grad(function, (0, 1))(x, c)
    near(found, value, 1e-4)
    near(np.array([g.item() for g in gradient]), slopes, 1e-3)


def test_bounds() -> None:
    grow = lambda s: td.while_loop(lambda s: s < 100, lambda s: s * 2, s, max_iterations=3)  # noqa: E731
    near(grow(td.tensor(1.0)), 8)
    near(td.grad(grow)(1.0), 8)
    none = lambda s: td.while_loop(lambda s: s < 9, lambda s: s * 2, s, max_iterations=0)  # noqa: E731
    near(none(td.tensor(1.0)), 1)
    near(td.grad(none)(1.0), 1)
    kept = lambda s: td.while_loop(lambda s: s < 9, lambda s: s * 2, s, 5, recompute=True)  # noqa: E731
    near(td.grad(kept)(1.0), 16)


@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({}, td.ArgumentError, ("no bound", "max_iterations")),
        ({"max_iterations": -1}, td.ArgumentError, ("max_iterations is -1",)),
        ({"max_iterations": 2.0}, td.ArgumentError, ("max_iterations is 2.0",)),
        ({"cond_fn": lambda s: s}, td.DTypeError, ("float32[]", "not bool")),
        ({"cond_fn": lambda s: td.ones((2,)) > s}, td.ShapeError, ("bool[2]", "td.vmap")),
        ({"body_fn": lambda s: (s, s)}, td.ArgumentError, ("state comes back", "(0, 1), not 0")),
        ({"body_fn": lambda s: s > 0}, td.DTypeError, ("state 0 is float32[] and", "bool[]")),
        ({"body_fn": lambda s: td.ones((2,))}, td.ShapeError, ("state 0", "float32[2]", "cast")),
    ],
)
def test_refusals_of_loops(options: Any, error: Any, fragments: tuple[str, ...]) -> None:
    given = {"cond_fn": lambda s: s < 5, "body_fn": lambda s: s + 1, "max_iterations": 3} | options
    if not options:
        del given["max_iterations"]
    eagerly = lambda: td.while_loop(init=td.tensor(1.0), **given)  # noqa: E731
    refused(eagerly, error, "while_loop", *fragments)
    traced = lambda: td.grad(lambda s: td.while_loop(init=s, **given))(ONE)  # noqa: E731
    refused(traced, error, "while_loop", *fragments)


def affine(first: Any, second: Any) -> Any:
    """One step of h = a h + b after another."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def recurrence(a: Any, b: Any, dim: int = 0, reverse: bool = False) -> td.Tensor:
    return td.associative_scan(affine, (a, b), dim, reverse)[1]


def stepwise(a: Any, b: Any) -> td.Tensor:
    start = td.zeros(a.shape[1:])
    return td.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, start, (a, b))[1]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 16, 33])
def test_a_linear_recurrence(length: int) -> None:
    a, b, ct = rng.uniform(0.5, 1, (length, 3)).astype(np.float32), *normal(2, length, 3)
    found, of_ours = td.vjp(recurrence, a, b)
    wanted, of_theirs = td.vjp(stepwise, a, b)
    near(found, wanted)
    for ours, theirs in zip(of_ours(td.tensor(ct)), of_theirs(td.tensor(ct)), strict=True):
        near(ours, theirs)
    across = recurrence(a.T, b.T, dim=-1)
    near(across, found.numpy().T)
    back = recurrence(a[::-1], b[::-1], reverse=True)
    near(back, found.numpy()[::-1])


def test_elements_are_combined_in_order() -> None:
    """Matrices do not commute; the function sees two of them, not a batch."""
    m = normal(6, 2, 2)
    found = td.associative_scan(lambda x, y: x @ y, m)
    product = np.eye(2)
    for i in range(6):
        product = product @ m[i]
        near(found[i], product, 1e-4)
    same = td.vmap(lambda m: td.associative_scan(lambda x, y: x @ y, m))(np.stack([m, m[::-1]]))
    near(same[0], found.numpy())
    near(td.associative_scan(td.maximum, np.array([3, 1, 4, 1, 5], np.int32)), [3, 3, 4, 4, 5], 0)
    assert td.associative_scan(td.add, np.zeros((2, 0), np.float32), dim=1).shape == (2, 0)


def test_the_depth_is_the_logarithm() -> None:
    for length in (64, 1000):
        graph = td.trace(lambda x: td.associative_scan(td.add, x), td.Spec((length,)))
        count = sum(n.op.name == "add" for n in graph.nodes)
        assert count <= 2 * math.ceil(math.log2(length))


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (lambda: td.associative_scan(td.add, ()), td.ArgumentError, ("no tensors",)),
        (lambda: td.associative_scan(td.add, ONE), td.AxisError, ("axis 0", "float32[]")),
        (lambda: td.associative_scan(affine, (np.ones(3), np.ones(4))),
         td.ShapeError, ("float64[3] along 0", "float64[4] along 0")),
        (lambda: td.associative_scan(lambda x, y: (x, y), np.ones(3)),
         td.ArgumentError, ("element comes back in another structure",)),
        (lambda: td.associative_scan(lambda x, y: x > y, np.ones(3)),
         td.DTypeError, ("element 0 is float64[] and comes back as bool[]",)),
    ],
)  # fmt: skip
def test_refusals_of_associative_scans(call: Any, error: Any, fragments: tuple[str, ...]) -> None:
    refused(call, error, "associative_scan", *fragments)


def everything(x: td.Tensor, a: td.Tensor, b: td.Tensor) -> Any:
    """Values and gradients of all three, for one program."""
    conditions = [td.vmap(td.value_and_grad(f))(x) for f in CONDITIONS[1:3]]
    roots = td.vmap(td.value_and_grad(lambda a: root(a)[1]))(x * x + 1)
    lost = td.vmap(td.grad(drained, (0, 1)))(-abs(x), x * 0)
    states = td.value_and_grad(lambda a, b: (recurrence(a, b) ** 2).sum(), (0, 1))(a, b)
    return conditions, roots, lost, states


def test_natively() -> None:
    a, b = rng.uniform(0.5, 1, (17, 3)).astype(np.float32), normal(17, 3)
    specs = [td.Spec(v.shape) for v in (AT, a, b)]
    found, oracle = (td.compile(everything, *specs, device=d)(AT, a, b) for d in ("cpu", "oracle"))
    flat = lambda tree: trees.flatten(tree)[0]  # noqa: E731
    for ours, theirs in zip(flat(found), flat(oracle), strict=True):
        assert np.isfinite(ours).all()
        near(ours, theirs, 1e-4)
    near(found[0][0][1], SLOPES)
