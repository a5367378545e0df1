"""The column of batching rules: `vmap` of every op on every sample is the stack of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import treadle as td
from treadle.autodiff.backward import has_gradient, vjp_graph
from treadle.base import trees
from treadle.batching.walk import BATCHING, batch_graph
from treadle.domains.float64 import evaluate_float64, lift
from treadle.frontend.scopes import EAGER, bind
from treadle.ir.graph import Graph
from treadle.ir.op import OPS, Op
from treadle.ir.ops.leaves import NAMED_LEAVES
from treadle.ir.verify import verify
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample, sample_graph

SIZE = 3
MAPPED = [op for op in OPS.values() if op not in NAMED_LEAVES and samples_of(op)[0].operands]


def choices(count: int) -> Iterator[tuple[bool, ...]]:
    """Every operand mapped; only one of them; all but one."""
    found = {(True,) * count}
    for i in range(count):
        found |= {tuple(j == i for j in range(count)), tuple(j != i for j in range(count))}
    return (c for c in sorted(found) if any(c))


def draws(sample: Sample) -> list[dict[str, np.ndarray]]:
    return [sample.arrays(seed) for seed in range(SIZE)]


def tensors(sample: Sample, mapped: Sequence[bool], axis: int) -> list[td.Tensor]:
    """Eager operands: stacks of the mapped ones, the first draw of the others."""
    each, found = draws(sample), []
    for i, (draw, is_mapped) in enumerate(zip(sample.operands, mapped, strict=True)):
        parts = [arrays[str(i)] for arrays in each]
        array = np.stack(parts, axis) if is_mapped else parts[0]
        found.append(EAGER.wrap(lift(array, draw.type), draw.type.with_shape(array.shape)))
    return found


def expected(graph: Graph, sample: Sample, mapped: Sequence[bool], axis: int) -> list[np.ndarray]:
    """The graph of one element, once for each."""
    first, *_ = each = draws(sample)
    rows = [
        evaluate_float64(graph, {n: (a if mapped[int(n)] else first[n]) for n, a in given.items()})
        for given in each
    ]
    return [np.stack(column, axis) for column in zip(*rows, strict=True)]


def compare(op: Op, sample: Sample, mapped: tuple[bool, ...], axis: int) -> None:
    given = tensors(sample, mapped, axis)
    dims = tuple(axis if m else None for m in mapped)
    found = td.vmap(lambda *xs: bind(op, sample.attributes, *xs), dims, axis)(*given)
    wanted = expected(sample_graph(op, sample), sample, mapped, axis)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        message = f"{sample.attributes}, mapped {mapped}, axis {axis}"
        np.testing.assert_allclose(ours.handle, theirs, 1e-12, 1e-13, err_msg=message)


@pytest.mark.parametrize("op", MAPPED, ids=str)
def test_a_batch_is_the_stack_of_its_elements(op: Op) -> None:
    for sample in samples_of(op):
        for mapped in choices(len(sample.operands)):
            compare(op, sample, mapped, 0)
        compare(op, sample, (True,) * len(sample.operands), -1)


DIFFERENTIABLE = [
    op
    for op in MAPPED
    if has_gradient(op)
    and sample_graph(op, samples_of(op)[0]).output_types[0].is_float
    and any(d.type.is_float for d in samples_of(op)[0].operands)
]


def gradients(graph: Graph, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of the floats among the inputs for the cotangents among the arrays, by name."""
    floats = [n for n, i in graph.leaves.items() if graph.nodes[i].types[0].is_float]
    present = [f"ct^{i}" in arrays for i in range(len(graph.outputs))]
    backward = verify(vjp_graph(graph, present, floats))
    found = evaluate_float64(backward, arrays)
    return {o.name: v for o, v in zip(backward.outputs, found, strict=True)}


def check_gradients(op: Op, sample: Sample, mapped: tuple[bool, ...]) -> None:
    """The vjp of a batch, and the batch of vjps: both are the vjps of the elements."""
    graph = sample_graph(op, sample)
    names = frozenset(str(i) for i, m in enumerate(mapped) if m)
    rng = np.random.default_rng(5)
    cts = {
        f"ct^{i}": rng.standard_normal((SIZE, *t.shape))
        for i, t in enumerate(graph.output_types)
        if t.is_float
    }
    each = draws(sample)
    shared = {n: a for n, a in each[0].items() if n not in names}
    rows = [
        gradients(
            graph, shared | {n: given[n] for n in names} | {n: ct[k] for n, ct in cts.items()}
        )
        for k, given in enumerate(each)
    ]
    wanted = {n: np.stack([row[n] for row in rows]) for n in rows[0]}
    given = shared | {n: np.stack([a[n] for a in each]) for n in names} | cts
    wide = verify(batch_graph(graph, names, SIZE, spread=frozenset(range(len(graph.outputs)))))
    of_batch = gradients(wide, given)
    for name, value in wanted.items():
        total = value if name in names else value.sum(0)
        np.testing.assert_allclose(of_batch[name], total, 1e-9, 1e-11, err_msg=name)
    floats = [n for n, i in graph.leaves.items() if graph.nodes[i].types[0].is_float]
    vjp = vjp_graph(graph, [f"ct^{i}" in cts for i in range(len(graph.outputs))], floats)
    every = frozenset(range(len(vjp.outputs)))
    batch_of = verify(batch_graph(vjp, frozenset(names | cts.keys()), SIZE, spread=every))
    for output, value in zip(vjp.outputs, evaluate_float64(batch_of, given), strict=True):
        np.testing.assert_allclose(value, wanted[output.name], 1e-9, 1e-11, err_msg=output.name)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_gradients_of_a_batch_and_a_batch_of_gradients(op: Op) -> None:
    sample = samples_of(op)[0]
    check_gradients(op, sample, (True,) * len(sample.operands))
    if len(sample.operands) > 1:
        check_gradients(op, sample, (True, *(False for _ in sample.operands[1:])))


@pytest.mark.slow
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_gradients_on_every_sample(op: Op) -> None:
    for sample in samples_of(op):
        for mapped in choices(len(sample.operands)):
            check_gradients(op, sample, mapped)


FOLDED = """relu sigmoid silu gelu softplus mean var softmax log_softmax logsumexp layer_norm rms_norm
    batch_norm group_norm attention attention_grad cross_entropy conv conv_grad_x conv_grad_w max_pool avg_pool
    one_hot""".split()


@pytest.mark.parametrize("name", FOLDED)
def test_composites_stay_composites(name: str) -> None:
    sample = samples_of(OPS[name])[0]
    names = frozenset(str(i) for i in range(len(sample.operands)))
    graph = batch_graph(sample_graph(OPS[name], sample), names, SIZE)
    assert sum(node.op is OPS[name] for node in graph.nodes) == 1


def test_a_wrong_rule_is_told_apart() -> None:
    """The comparison above can fail."""
    op = OPS["flip"]
    right = BATCHING._entries[op]
    try:
        BATCHING._entries[op] = lambda attributes, batch, x: bind(op, attributes, x)
        with pytest.raises(AssertionError):
            compare(op, samples_of(op)[0], (True,), 0)
    finally:
        BATCHING._entries[op] = right


@pytest.mark.slow
@pytest.mark.parametrize("op", MAPPED, ids=str)
def test_natively(op: Op) -> None:
    """One program for some samples of an op, each mapped over all operands and over the last."""
    given, functions = [], []
    # A program refuses labels beyond the classes, which the second sample of one_hot has.
    for sample in samples_of(op)[: 1 if op.name == "one_hot" else 4]:
        count = len(sample.operands)
        for mapped in {(True,) * count, (*(False,) * (count - 1), True)}:
            dims = tuple(0 if m else None for m in mapped)
            function = lambda *xs, s=sample: bind(op, s.attributes, *xs)  # noqa: E731
            functions.append(td.vmap(function, dims))
            given.append([t.numpy() for t in tensors(sample, mapped, 0)])

    def together(arguments: list[list[td.Tensor]]) -> list[td.Tensor]:
        return [f(*xs) for f, xs in zip(functions, arguments, strict=True)]

    found, oracle = (
        td.compile(together, [[td.Spec(a.shape, a.dtype) for a in xs] for xs in given], device=d)(
            given
        )
        for d in ("cpu", "oracle")
    )
    for ours, theirs in zip(trees.flatten(found)[0], trees.flatten(oracle)[0], strict=True):
        near = np.asarray(theirs, np.float64)
        np.testing.assert_allclose(np.asarray(ours, np.float64), near, 1e-4, 1e-5)
