"""The op table: every cell filled, and every op right on all its samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from references import REFERENCES, torch_dtype
from treadle.autodiff.backward import VJP, definition_vjp, has_gradient, vjp_graph
from treadle.batching.walk import BATCHING
from treadle.domains.domain import evaluate
from treadle.domains.dual import TANGENT, Dual, DualNumber
from treadle.domains.field import ORDER, RESIDUE, FiniteField, Residues, same
from treadle.domains.float64 import MEANING, Float64, evaluate_float64, lift
from treadle.domains.philox import random_bits
from treadle.frontend.scopes import isolated_tracing
from treadle.ir.composites import DEFINITIONS, definition_graph
from treadle.ir.contract import Contract
from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind
from treadle.ir.op import NONE, OPS, Attributes, Op, Precision
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import RANDOM_BITS
from treadle.ir.ops.leaves import CONSTANT, INPUT, NAMED_LEAVES, Constant, Leaf
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.parse import parse
from treadle.ir.table import all_composites, primitives
from treadle.ir.text import to_text
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.schedule import schedule as schedule  # fills the tables of kernels
from treadle.schedule.inline import INLINE
from treadle.schedule.keep import ROOTS
from treadle.verify.samples import samples_of
from treadle.verify.sampling import SAMPLES, Sample, sample_graph

BODIED = (CALL, SCAN)
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in OPS.values()
    if op not in NAMED_LEAVES
    for i, sample in enumerate(samples_of(op))
]
DIFFERENTIABLE = [
    case
    for case in CASES
    if has_gradient(case.values[0])
    and all(t.is_float for t in sample_graph(*case.values).output_types[:1])
    and any(d.type.is_float for d in case.values[1].operands)
]


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_no_cell_is_empty(op: Op) -> None:
    assert issubclass(op.attributes, Attributes)
    assert isinstance(op.precision, Precision)
    assert isinstance(op.contract, Contract)
    assert op.contract.domain
    assert op.contract.subgradient
    assert op in SAMPLES, "samples"
    if op in NAMED_LEAVES:
        return
    if op.is_composite:
        assert op in DEFINITIONS, "definition"
        return
    assert op in VJP, "vjp"
    assert op in BATCHING, "batching rule"
    is_lowered = op in INLINE or op in ROOTS or op in BODIED
    assert is_lowered, "lowering: an index inside the kernel that reads it, or a kernel of its own"
    if op not in BODIED:  # a body's ops are what has these cells
        assert op in MEANING, "meaning"
        assert op in TANGENT, "tangent"
    takes_reals = any(t.is_float for s in samples_of(op) for t in sample_types(op, s))
    if op not in BODIED and takes_reals:
        assert op in RESIDUE or op in ORDER, "residues"


def sample_types(op: Op, sample: Sample) -> list[TensorType]:
    return [*sample_graph(op, sample).output_types, *(d.type for d in sample.operands)]


def test_every_op_of_the_design_is_there() -> None:
    expected = """
        input parameter state constant iota
        neg exp log sqrt rsqrt sin cos tanh erf abs sign floor not stop_gradient cast
        add sub mul div floordiv mod max min pow atan2 eq lt le and or xor where
        reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum sort top_k shard_sum
        reshape permute broadcast slice pad concat flip dynamic_slice dynamic_update_slice
        contract window unwindow gather scatter_add random_bits call scan
    """.split()
    assert {op.name for op in primitives()} == set(expected)
    composites = """
        softmax log_softmax logsumexp layer_norm rms_norm gelu silu sigmoid softplus relu attention
        attention_grad cross_entropy linear_cross_entropy linear_cross_entropy_grad conv
        conv_grad_x conv_grad_w batch_norm group_norm max_pool
        avg_pool mean var one_hot embedding
    """.split()
    assert {op.name for op in all_composites()} == set(composites)


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_types_and_text(op: Op, sample: Sample) -> None:
    graph = verify(sample_graph(op, sample))
    assert parse(to_text(graph)) == graph
    assert parse(to_text(graph, origins=True)) == graph


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint32:
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize(
    ("op", "sample"),
    [
        c
        for c in CASES
        if c.values[0] not in (*BODIED, RANDOM_BITS) and c.values[0].name != "attention_grad"
    ],
)
def test_oracle_equals_pytorch(op: Op, sample: Sample) -> None:
    graph = sample_graph(op, sample)
    arrays = sample.arrays()
    found = evaluate_float64(graph, arrays)
    expected = REFERENCES[op.name](sample.attributes, *map(as_torch, arrays.values()))
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(found) == len(expected)
    for ours, theirs, type_ in zip(found, expected, graph.output_types, strict=True):
        assert ours.shape == tuple(theirs.shape) == type_.shape
        wide = theirs.to(torch_dtype(type_.dtype)).numpy()
        np.testing.assert_allclose(ours, wide, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("sample", samples_of(RANDOM_BITS))
def test_random_bits_are_philox(sample: Sample) -> None:
    (key,) = sample.arrays().values()
    (found,) = evaluate_float64(sample_graph(RANDOM_BITS, sample), sample.arrays())
    call = sample.attributes
    np.testing.assert_array_equal(found, random_bits(key, call.site, call.shape, call.blocks))


@pytest.mark.parametrize("op", BODIED, ids=str)
def test_bodies_run_as_the_loop_they_are(op: Op) -> None:
    for sample in samples_of(op):
        a = sample.arrays()
        found = evaluate_float64(sample_graph(op, sample), a)
        if op is CALL:
            expected = np.tanh(a["0"]) * a["1"], a["0"] + a["1"]
        else:
            h, ys = a["1"], {}
            steps = range(4)
            for i in reversed(steps) if sample.attributes.reverse else steps:
                new = np.tanh(h * a["0"] + a["2"][i])
                ys[i] = new * h
                h = new
            expected = h, np.stack([ys[i] for i in steps])
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-14)


SCALE = 1.25


def mid_graph(op: Op, sample: Sample, seed: int = 0) -> Graph:
    """A scalar in whose middle the op stands: operands are made, used twice, and squared after.

    loss = Σ v · op(u)² + Σ r · u², u = 1.25 · x: the cotangent of the op is not one, and u has
    another use.
    """
    rng = np.random.default_rng(seed)
    builder = GraphBuilder()

    def constant(value: float, type_: TensorType):
        return builder.add(CONSTANT, Constant(value, type_), ())[0]

    def apply(op: Op, attributes: Attributes, *operands):
        return builder.add(op, attributes, operands)[0]

    terms = []

    def add_square(value) -> None:
        type_ = builder.type_of(value)
        wide = apply(e.CAST, e.Cast(TensorType(()).dtype), value)
        weight = constant(float(rng.uniform(0.3, 1.0)), builder.type_of(wide))
        product = apply(e.MUL, NONE, apply(e.MUL, NONE, wide, wide), weight)
        terms.append(apply(REDUCE_SUM, Reduce(tuple(range(type_.rank))), product))

    operands = []
    for i, draw in enumerate(sample.operands):
        (x,) = builder.add(INPUT, Leaf(str(i), draw.type), ())
        if draw.type.is_float:
            x = apply(e.MUL, NONE, x, constant(SCALE, draw.type))
            add_square(x)
        operands.append(x)
    for value in builder.add(op, sample.attributes, operands):
        if builder.type_of(value).is_float:
            add_square(value)
    total = terms[0]
    for term in terms[1:]:
        total = apply(e.ADD, NONE, total, term)
    return builder.build([Output(OutputKind.RESULT, "0", total)], f"mid_{op.name}")


def scaled_arrays(sample: Sample) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(a / SCALE) if a.dtype == np.float64 else a
        for name, a in sample.arrays(1).items()
    }


def gradients_of(graph: Graph, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    floats = [n for n, a in arrays.items() if a.dtype == np.float64]
    backward = verify(vjp_graph(graph, [True], floats))
    found = evaluate_float64(backward, arrays | {"ct^0": np.float64(1)})
    return dict(zip((o.name for o in backward.outputs), found, strict=True))


@pytest.mark.parametrize(("op", "sample"), DIFFERENTIABLE)
def test_gradients_equal_central_differences_mid_graph(op: Op, sample: Sample) -> None:
    graph, arrays = mid_graph(op, sample), scaled_arrays(sample)
    gradients = gradients_of(graph, arrays)
    for name, gradient in gradients.items():
        x = arrays[name]
        expected = np.zeros_like(x)
        for place in np.ndindex(*x.shape):
            ends = []
            step = 3e-6 * max(1.0, abs(x[place]))
            for sign in (1, -1):
                moved = x.copy()
                moved[place] += sign * step
                ends.append(evaluate_float64(graph, arrays | {name: moved})[0])
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        assert np.abs(gradient - expected).max(initial=0) <= 1e-6 * scale, name


@pytest.mark.parametrize(("op", "sample"), DIFFERENTIABLE)
def test_forward_mode_equals_reverse_mode(op: Op, sample: Sample) -> None:
    graph, arrays = mid_graph(op, sample), scaled_arrays(sample)
    rng = np.random.default_rng(5)
    directions = {
        n: rng.standard_normal(a.shape) for n, a in arrays.items() if a.dtype == np.float64
    }
    leaves = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    duals = {n: DualNumber(lift(a, leaves[n]), directions.get(n)) for n, a in arrays.items()}
    (loss,) = evaluate(graph, duals, Dual(Float64()))
    reverse = sum((gradients_of(graph, arrays)[n] * d).sum() for n, d in directions.items())
    np.testing.assert_allclose(loss.tangent, reverse, rtol=1e-9, atol=1e-11)


def field_inputs(
    sample: Sample, field: FiniteField, rng: np.random.Generator
) -> dict[str, Residues]:
    arrays = sample.arrays(2)
    return {
        str(i): field.random(d.type, rng) if d.type.is_float else field.lift(arrays[str(i)], d.type)
        for i, d in enumerate(sample.operands)
    }


def field_dot(field: FiniteField, pairs) -> tuple[int, int]:
    """Σ a · b in each lane."""
    totals = []
    for lane, part in ((field.lane_q, "q"), (field.lane_p, "p")):
        total = 0
        for a, b in pairs:
            x, y = getattr(a, part), getattr(b, part)
            total += int((x * y % lane.modulus).sum())
        totals.append(total % lane.modulus)
    return totals[0], totals[1]


def check_adjoint(graph: Graph, inputs: dict[str, Residues], trial: int) -> tuple[bool, bool]:
    """Whether ⟨v, J u⟩ = ⟨Jᵀ v, u⟩ in each lane, for random u and v."""
    field, rng = FiniteField(trial), np.random.default_rng(trial)
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    u = {n: field.random(t, rng) for n, t in types.items() if t.is_float}
    duals = evaluate(graph, {n: DualNumber(x, u.get(n)) for n, x in inputs.items()}, Dual(field))
    present = [t.is_float for t in graph.output_types]
    v = [field.random(t, rng) if t.is_float else None for t in graph.output_types]
    forward = field_dot(
        field,
        [(a, d.tangent) for a, d in zip(v, duals, strict=True) if a is not None and d.tangent],
    )
    backward = vjp_graph(graph, present, list(u))
    cts = {f"ct^{i}": a for i, a in enumerate(v) if a is not None}
    gradients = evaluate(backward, inputs | cts, field)
    reverse = field_dot(
        field, [(g, u[o.name]) for g, o in zip(gradients, backward.outputs, strict=True)]
    )
    return forward[0] == reverse[0], forward[1] == reverse[1]


# Ops that are polynomials, or that only choose and move: both lanes must hold.
RATIONAL = {op.name for op in OPS.values()} - set(
    """exp log sqrt rsqrt sin cos tanh erf pow gelu silu sigmoid softplus softmax log_softmax
           logsumexp layer_norm rms_norm attention attention_grad cross_entropy linear_cross_entropy
           linear_cross_entropy_grad call scan""".split()
)


@pytest.mark.parametrize(("op", "sample"), DIFFERENTIABLE)
def test_adjoint_is_exact_over_the_field(op: Op, sample: Sample) -> None:
    graph = sample_graph(op, sample)
    for trial in range(2):
        inputs = field_inputs(sample, FiniteField(trial), np.random.default_rng(trial + 10))
        q, p = check_adjoint(graph, inputs, trial)
        assert (q and p) if op.name in RATIONAL else (q or p)


COMPOSITES = [c for c in DIFFERENTIABLE if c.values[0].is_composite]


@pytest.mark.parametrize(("op", "sample"), COMPOSITES)
def test_composite_equals_its_definition_in_value_and_gradient(op: Op, sample: Sample) -> None:
    types = tuple(d.type for d in sample.operands)
    definition = definition_graph(op, sample.attributes, types)
    node = sample_graph(op, sample)
    arrays = sample.arrays(3)
    rng = np.random.default_rng(9)
    present = [t.is_float for t in node.output_types]
    floats = [str(i) for i, t in enumerate(types) if t.is_float]
    cts = {
        f"ct^{i}": rng.standard_normal(t.shape)
        for i, t in enumerate(node.output_types)
        if t.is_float
    }
    for ours, theirs in zip(
        evaluate_float64(node, arrays), evaluate_float64(definition, arrays), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for some in (present, [i == 0 for i in range(len(present))]):
        graphs = vjp_graph(node, some, floats), vjp_graph(definition, some, floats)
        assert [o.name for o in graphs[0].outputs] == [o.name for o in graphs[1].outputs]
        values = [evaluate_float64(g, arrays | cts) for g in graphs]
        for ours, theirs in zip(*values, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("op", "sample"), COMPOSITES)
def test_composite_gradient_equals_its_definitions_over_the_field(op: Op, sample: Sample) -> None:
    types = tuple(d.type for d in sample.operands)
    definition, node = definition_graph(op, sample.attributes, types), sample_graph(op, sample)
    some = [i == 0 for i in range(len(node.outputs))]
    floats = [str(i) for i, t in enumerate(types) if t.is_float]
    field, rng = FiniteField(3), np.random.default_rng(3)
    inputs = field_inputs(sample, field, rng) | {"ct^0": field.random(node.output_types[0], rng)}
    ours, theirs = (evaluate(vjp_graph(g, some, floats), inputs, field) for g in (node, definition))
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_wrong_vjp_is_told_apart() -> None:
    """The checks above can fail: a rule off by a factor is noticed over the field."""
    sample = samples_of(OPS["mul"])[0]
    graph = sample_graph(OPS["mul"], sample)
    field, rng = FiniteField(0), np.random.default_rng(0)
    inputs = field_inputs(sample, field, rng)
    right = VJP._entries[OPS["mul"]]
    try:
        VJP._entries[OPS["mul"]] = lambda ct, out, x, y: (ct * y * 2, ct * x)
        assert check_adjoint(graph, inputs, 0) == (False, False)
    finally:
        VJP._entries[OPS["mul"]] = right
    assert check_adjoint(graph, inputs, 0) == (True, True)


def test_definition_vjp_is_only_for_composites() -> None:
    with isolated_tracing("t") as trace:
        x = trace.input("x", TensorType(()))
        with pytest.raises(AssertionError, match="has no vjp"):
            definition_vjp(OPS["add"], NONE, (x,), (x, x))
