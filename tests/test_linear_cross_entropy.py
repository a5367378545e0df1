"""Cross-entropy through a head: PyTorch's value and gradients, streamed without the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import backend
import treadle as td
from backend import THREADS, assert_within, build, same_bits
from refusals import refused
from treadle import losses, nn, optim
from treadle.autodiff.backward import differentiate
from treadle.base.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from treadle.frontend.mean import Mean
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.kernel.target import CPU
from treadle.memory.plan import plan_buffers
from treadle.schedule.schedule import schedule

Arrays = dict[str, np.ndarray]


def value_of(loss: Any) -> Any:
    return loss.tensor() if isinstance(loss, Mean) else loss


def draw(
    rows: tuple[int, ...], width: int, classes: int, ignored: int = 0, seed: int = 0
) -> Arrays:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    if ignored:
        target.flat[::ignored] = -100
    return {
        "x": rng.standard_normal((*rows, width)),
        "weight": rng.standard_normal((classes, width)),
        "bias": rng.standard_normal(classes),
        "target": target.astype(np.int32),
    }


# The oracle beside PyTorch


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"ignore_index": 3},
    {"weight": np.linspace(0.0, 2.0, 7)},
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("rows", [(5,), (2, 3), ()])
def test_value_and_gradients_are_pytorchs(
    rows: tuple[int, ...], options: dict[str, Any], has_bias: bool, reduction: str
) -> None:
    arrays = draw(rows, 4, 7, ignored=3 if len(rows) == 2 else 0)
    if "ignore_index" in options:
        arrays["target"] = np.arange(math.prod(rows), dtype=np.int32).reshape(rows)

    def ours(x: Any, weight: Any, bias: Any, target: Any) -> Any:
        head_bias = bias if has_bias else None
        rows = losses.linear_cross_entropy(
            td.tanh(x), weight, target, linear_bias=head_bias, reduction=reduction, **options
        )
        loss = value_of(rows)
        return (loss * loss).sum() + loss.sum() * 3  # mid-graph: what follows is not linear

    theirs = {n: torch.as_tensor(v) for n, v in options.items() if n == "weight"}
    others = {n: v for n, v in options.items() if n != "weight"}
    leaves = [torch.tensor(arrays[n], requires_grad=True) for n in ("x", "weight", "bias")]
    logits = F.linear(torch.tanh(leaves[0]), leaves[1], leaves[2] if has_bias else None)
    flat = torch.tensor(arrays["target"]).long()
    expected = F.cross_entropy(
        logits.reshape(-1, 7), flat.reshape(-1), reduction=reduction, **theirs, **others
    )
    value = (expected * expected).sum() + expected.sum() * 3
    value.backward()
    given = [td.tensor(arrays[n]) for n in ("x", "weight", "bias", "target")]
    numbers = (0, 1, 2) if has_bias else (0, 1)
    found, gradients = td.value_and_grad(ours, numbers)(*given)
    np.testing.assert_allclose(float(found), value.item(), rtol=1e-10)
    for gradient, leaf in zip(gradients, leaves, strict=False):
        np.testing.assert_allclose(gradient.numpy(), leaf.grad, rtol=1e-9, atol=1e-11)


def test_all_ignored_is_as_in_pytorch() -> None:
    arrays = draw((3,), 4, 7)
    target = np.full(3, -100)
    given = td.tensor(arrays["x"]), td.tensor(arrays["weight"]), td.tensor(target)
    total = losses.linear_cross_entropy(*given, reduction="sum")
    assert float(total) == 0.0
    assert math.isnan(losses.linear_cross_entropy(*given).item())
    gradients = td.grad(
        lambda x, w: losses.linear_cross_entropy(x, w, target, reduction="sum"), (0, 1)
    )(*given[:2])
    assert not any(g.numpy().any() for g in gradients)


# Streams


@contextmanager
def small_chunks(rows: int = 4, block: int = 6) -> Iterator[Callable[[Graph], Program]]:
    """Chunked loops for few rows and classes, in several chunks and blocks."""
    streaming = replace(CPU.streaming, least_rows=rows, block=block)
    rewriting = replace(CPU.rewriting, least_classes=1)
    target = replace(CPU, streaming=streaming, rewriting=rewriting)
    small = partial(schedule, target=target)
    with mock.patch.object(backend, "schedule", small):
        yield small


def loss_graph(
    rows: int,
    width: int,
    classes: int,
    has_bias: bool = False,
    wrt: tuple[str, ...] = ("x", "weight", "bias"),
    **options: Any,
) -> Graph:
    """The loss in the middle of a graph, with gradients of what is named."""

    def loss(x: Any, weight: Any, bias: Any, target: Any) -> Any:
        head_bias = bias if has_bias else None
        found = losses.linear_cross_entropy(
            td.tanh(x), weight * 2, target, linear_bias=head_bias, **options
        )
        return value_of(found) * 3

    specs = (td.Spec((rows, width)), td.Spec((classes, width)), td.Spec((classes,)))
    graph = td.trace(loss, *specs, td.Spec((rows,), td.int32))
    names = [n for n in wrt if n != "bias" or has_bias]
    return differentiate(graph, names).graph if names else graph


def arrays_for(graph: Graph, **options: Any) -> Arrays:
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    found = draw(types["target"].shape, types["x"].shape[1], types["weight"].shape[0], **options)
    return {n: found[n].astype(t.dtype.numpy) for n, t in types.items()}


def streamed(graph: Graph, arrays: Arrays) -> list[np.ndarray]:
    """What a graph gives as a stream: near the oracle, the same bits on any number of threads."""
    built = build(graph, shared=True)
    assert any("linear_cross_entropy" in k.name for k in built.plan.kernels)
    found = built.on(1).run(arrays)
    assert_within(graph, arrays, found)
    for threads in THREADS[1:]:
        assert same_bits(built.on(threads).run(arrays), found), threads
    return found


SIZES = [
    # rows, width, classes: chunks of four rows, blocks of six classes
    (8, 8, 12),  # all even
    (9, 5, 13),  # a row, a class and columns left over
    (3, 33, 7),  # one chunk
    (11, 1, 5),  # one short block
    (1, 4, 40),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_streams_in_chunks_and_blocks(
    size: tuple[int, int, int], has_bias: bool, smoothing: float
) -> None:
    graph = loss_graph(*size, has_bias, label_smoothing=smoothing)
    with small_chunks():
        streamed(graph, arrays_for(graph, ignored=3 if size[0] > 1 else 0))
        forward = loss_graph(*size, has_bias, wrt=(), label_smoothing=smoothing)
        streamed(forward, arrays_for(forward))


@pytest.mark.parametrize("size", [(130, 40, 700), (200, 33, 513)], ids=str)
def test_streams_of_real_blocks(size: tuple[int, int, int]) -> None:
    graph = loss_graph(*size, True)
    streamed(graph, arrays_for(graph, ignored=4))


@pytest.mark.parametrize("wrt", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_only_gradients_that_are_read_are_computed(wrt: tuple[str, ...]) -> None:
    graph = loss_graph(9, 5, 13, True, wrt=wrt)
    with small_chunks() as small:
        streamed(graph, arrays_for(graph))
        whole = small(loss_graph(9, 5, 13, True))
        part = small(graph)
    assert sum(b.nbytes for b in part.buffers) < sum(b.nbytes for b in whole.buffers)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_vectors_of_any_width(width: int) -> None:
    graph = loss_graph(9, 70, 13, True)
    arrays = arrays_for(graph)
    with small_chunks():
        built = build(graph, width=width)
    assert_within(graph, arrays, built.on(2).run(arrays))


def test_extreme_logits() -> None:
    """Shifts of blocks far apart, blocks that are all −∞, and a target of probability 0."""
    graph = loss_graph(6, 4, 19, True)
    arrays = arrays_for(graph)
    arrays["x"][0] = 1e4
    arrays["bias"][:6] = -np.inf
    arrays["bias"][8] = 300.0
    arrays["target"][:] = [7, 8, 9, 18, 12, 6]
    with small_chunks():
        found = streamed(graph, arrays)
    assert all(np.isfinite(a).all() for a in found)
    arrays["target"][0] = 2
    with small_chunks():
        assert build(graph).on(1).run(arrays)[0] == np.inf


def test_a_nan_is_seen() -> None:
    graph = loss_graph(6, 4, 19)
    arrays = arrays_for(graph)
    arrays["x"][5, 2] = np.nan
    with small_chunks():
        value, d_x, d_weight = build(graph).on(1).run(arrays)
    assert np.isnan(value)
    assert np.isnan(d_x[5]).all()
    assert np.isfinite(d_x[:5]).all()
    assert np.isnan(d_weight).any()


@pytest.mark.parametrize("dtype", [td.int64, td.uint32, td.uint8, td.int8], ids=str)
def test_targets_of_any_integer(dtype: Any) -> None:
    def loss(x: Any, weight: Any, target: Any) -> Any:
        return losses.linear_cross_entropy(x, weight, target, reduction="sum")

    graph = td.trace(loss, td.Spec((7, 4)), td.Spec((300, 4)), td.Spec((7,), dtype))
    arrays = draw((7,), 4, 120)
    rng = np.random.default_rng(1)
    given = {
        "x": arrays["x"].astype(np.float32),
        "weight": rng.standard_normal((300, 4)).astype(np.float32),
        "target": arrays["target"].astype(dtype.numpy),
    }
    with small_chunks():
        streamed(graph, given)


# Memory


def plan_size(graph: Graph) -> int:
    return plan_buffers(schedule(graph)).size


def test_the_logits_are_never_stored() -> None:
    """At GPT-2's vocabulary a step needs a twentieth of the logits' memory beside its results."""
    rows, width, classes = 2048, 768, 50257
    specs = td.Spec((rows, width)), td.Spec((classes, width)), td.Spec((rows,), td.int32)

    def loss(x: Any, weight: Any, target: Any) -> Any:
        return value_of(losses.linear_cross_entropy(x, weight, target))

    graph = td.trace(loss, *specs)
    logits = rows * classes * 4
    assert plan_size(differentiate(graph, ["x", "weight"]).graph) <= 0.05 * logits
    assert plan_size(graph) <= 0.005 * logits


# Which composite computes what


def counts(graph: Graph) -> tuple[int, int]:
    ops = [n.op for n in graph.nodes]
    return ops.count(c.LINEAR_CROSS_ENTROPY), ops.count(c.LINEAR_CROSS_ENTROPY_GRAD)


def traced(function: Callable[..., Any]) -> Graph:
    return td.trace(function, td.Spec((6, 4)), td.Spec((9, 4)), td.Spec((6,), td.int32))


def rows_of(x: Any, weight: Any, target: Any) -> Any:
    return losses.linear_cross_entropy(x, weight, target, reduction="none")


def test_rows_and_gradients_are_one_composite() -> None:
    graph = differentiate(traced(lambda x, w, t: rows_of(x, w, t).mean()), ["x", "w"]).graph
    assert counts(graph) == (0, 1)


def test_a_cotangent_that_waits_for_the_rows_leaves_the_forward() -> None:
    def square(x: Any, weight: Any, target: Any) -> Any:
        rows = rows_of(x, weight, target)
        return (rows * rows).sum()

    assert counts(differentiate(traced(square), ["x", "weight"]).graph) == (1, 1)


def test_two_losses_that_weigh_each_other_do_not_go_round_in_circles() -> None:
    def both(x: Any, weight: Any, target: Any) -> Any:
        return rows_of(x, weight, target).sum() * rows_of(td.tanh(x), weight, target).sum()

    graph = differentiate(traced(both), ["x", "weight"]).graph
    assert counts(graph) == (1, 2)
    arrays = arrays_for(graph)
    with small_chunks():
        streamed(graph, arrays)


def test_second_derivatives() -> None:
    arrays = draw((3,), 2, 5)

    def slope(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return rows_of(x, td.tensor(arrays["weight"]), arrays["target"]).sum()

        gradient = td.grad(loss)(x)
        return (gradient * gradient).sum()

    x = torch.tensor(arrays["x"], requires_grad=True)
    logits = x @ torch.tensor(arrays["weight"]).T
    total = F.cross_entropy(logits, torch.tensor(arrays["target"]).long(), reduction="sum")
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    (first * first).sum().backward()
    found = td.grad(slope)(td.tensor(arrays["x"]))
    np.testing.assert_allclose(found.numpy(), x.grad, rtol=1e-9, atol=1e-12)


def test_inside_a_scan_and_a_checkpoint() -> None:
    """A scan's step is computed forward before its cotangents are known."""

    def looped(x: Any, weight: Any, target: Any) -> Any:
        def turn(total: Any, row: Any) -> Any:
            return total + rows_of(td.tanh(row), weight, target).sum(), total

        return td.scan(turn, td.zeros(()), x)[0]

    def checkpointed(x: Any, weight: Any, target: Any) -> Any:
        inner = td.checkpoint(lambda x, w: rows_of(td.tanh(x), w, target).sum())
        return inner(x, weight)

    spec = td.Spec((9, 4)), td.Spec((6,), td.int32)
    for function, shape in ((looped, (3, 6, 4)), (checkpointed, (6, 4))):
        graph = differentiate(td.trace(function, td.Spec(shape), *spec), ["x", "weight"]).graph
        rng = np.random.default_rng(2)
        arrays = {
            "x": rng.standard_normal(shape).astype(np.float32),
            "weight": rng.standard_normal((9, 4)).astype(np.float32),
            "target": rng.integers(0, 9, 6).astype(np.int32),
        }
        with small_chunks():
            assert_within(graph, arrays, build(graph).on(2).run(arrays))


# Training


class Tied(nn.Module):
    """Its embedding is its head."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(600, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Any) -> Any:
        return self.norm(self.embedding(x))


def fused(model: Any, batch: Any) -> Any:
    return losses.linear_cross_entropy(model(batch["x"]), model.embedding.weight, batch["y"])


def unfused(model: Any, batch: Any) -> Any:
    logits = td.linear(model(batch["x"]), model.embedding.weight)
    return losses.cross_entropy(logits, batch["y"], axis=-1)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    found = [
        {n: rng.integers(0, 600, (4, 20)).astype(np.int32) for n in "xy"} for _ in range(count)
    ]
    for i, batch in enumerate(found):
        batch["y"][0, : 3 + 4 * i] = -100  # other weights in each
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "clip_norm": 0.5}, {"precision": "bfloat16"}, {"precision": "float16"}],
    ids=str,
)
def test_training_is_that_of_the_unfused_loss(options: dict[str, Any]) -> None:
    spec = {n: td.Spec((4, 20), td.int32) for n in "xy"}
    given, found = batches(4), []
    for loss in (fused, unfused):
        step = td.compile_step(Tied(), loss, optim.adamw(1e-2), spec, device="cpu", **options)
        values = [float(step(b).loss) for b in given]
        found.append([*values, float(step.evaluate(given[0]).loss)])
    narrow = "precision" in options
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3 if narrow else 1e-5)


def test_accumulated_micro_batches_are_one_batch() -> None:
    """Weights are tokens that count: micro-batches that ignore more count less."""
    given = batches(2)
    whole = {n: np.concatenate([b[n] for b in given]) for n in "xy"}
    params = []
    for accumulate, several in ((2, given), (1, [whole])):
        spec = {n: td.Spec(a.shape, td.int32) for n, a in several[0].items()}
        step = td.compile_step(Tied(), fused, optim.sgd(1.0), spec, accumulate=accumulate)
        for batch in several:
            step(batch)
        params.append(step.params)
    for name, value in params[0].items():
        np.testing.assert_allclose(value, params[1][name], rtol=1e-5, atol=1e-6)


def test_debugging_finds_a_target_out_of_range() -> None:
    spec = {n: td.Spec((4, 20), td.int32) for n in "xy"}
    debug = td.CompileOptions(debug=True)
    step = td.compile_step(Tied(), fused, optim.sgd(0.1), spec, device="cpu", options=debug)
    (batch,) = batches(1)
    batch["y"][1, 1] = 600
    with pytest.raises(IndexRangeError):
        step(batch)


# Refusals


def test_mistakes_are_refused() -> None:
    x, weight, target = td.zeros((3, 4)), td.zeros((7, 4)), np.zeros(3, np.int32)

    def call(*operands: Any, **options: Any) -> Callable[[], Any]:
        return lambda: losses.linear_cross_entropy(*operands, **options)

    name = "linear_cross_entropy"
    refused(call(x, td.zeros((4, 7)), target), ShapeError, name, "(classes, features)")
    refused(call(x, td.zeros((4,)), target), ShapeError, name, "float32[4]")
    refused(call(x, weight, np.zeros(4, np.int32)), ShapeError, name, "each row")
    refused(call(x, weight, np.zeros((3, 7))), ShapeError, name, "each row")
    refused(call(x, weight, np.zeros(3)), DTypeError, name, "class indices")
    refused(call(x, weight, target, linear_bias=td.zeros((4,))), ShapeError, name, "each class")
    refused(call(x, weight, target, label_smoothing=2), ArgumentError, name, "0 to 1")
    refused(call(x, weight, target, reduction="most"), ArgumentError, name, "most")
    both = {"weight": np.ones(7), "label_smoothing": 0.1}
    refused(call(x, weight, target, **both), ArgumentError, name, "cross_entropy(linear")
    integers = x.astype(td.int32), weight.astype(td.int32), target
    refused(call(*integers), DTypeError, name, "Cast")
