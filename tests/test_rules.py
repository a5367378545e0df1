"""Rules of graphs: each fires where its pattern is, not beside it, and changes no value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import losses
from treadle.base import dtypes
from treadle.domains.field import equal_graphs
from treadle.frontend.coerce import constant
from treadle.frontend.scopes import bind1
from treadle.ir.graph import Graph, Value
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, linear, reductions, shaping
from treadle.ir.ops.elementwise import Cast
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.kernel.target import CPU, GPU, Target
from treadle.rules.canonical import canonical, canonicalise
from treadle.rules.catalogue import every_rule
from treadle.rules.driver import Keeps, rewrite
from treadle.rules.expansion import expand
from treadle.rules.pattern import Anything, Number, apply, captures, in_each_order, to_text
from treadle.rules.rule import RuleSet, always, take_x
from treadle.schedule import lower
from treadle.schedule.patterns import matmul_epilogues, spreads
from treadle.schedule.schedule import schedule

F32, BF16, I32 = dtypes.float32, dtypes.bfloat16, dtypes.int32
X = TensorType((2, 3), F32)
HEADS = replace(GPU, rewriting=replace(GPU.rewriting, least_classes=1, least_head_logits=1))


@dataclass(frozen=True)
class Case:
    """A function of tensors in which a rule fires, and near misses in which it must not."""

    fires: Callable[..., Any]
    misses: Sequence[Callable[..., Any]]
    types: Sequence[TensorType] = (X,)
    target: Target = CPU
    given: dict[str, Any] | None = None
    keeps: Keeps | None = None  # in the near misses


def view(op: Any, attributes: Any) -> Callable[[td.Tensor], td.Tensor]:
    return lambda x: bind1(op, attributes, x)


def reshaped(*shapes: tuple[int, ...]) -> Callable[[td.Tensor], td.Tensor]:
    def function(x: td.Tensor) -> td.Tensor:
        for shape in shapes:
            x = bind1(shaping.RESHAPE, shaping.Reshape(shape), x)
        return x

    return function


def permuted(*every: tuple[int, ...]) -> Callable[[td.Tensor], td.Tensor]:
    def function(x: td.Tensor) -> td.Tensor:
        for axes in every:
            x = bind1(shaping.PERMUTE, shaping.Permute(axes), x)
        return x

    return function


def in_dtypes(x: td.Tensor, first: dtypes.DType, second: dtypes.DType) -> td.Tensor:
    """x xᵀ, each factor in a dtype of its own."""
    factors = (bind1(e.CAST, Cast(d), x) for d in (first, second))
    return bind1(linear.CONTRACT, linear.Contraction("ab,cb->ac", BF16), *factors)


def negated(times: int) -> Callable[[td.Tensor], td.Tensor]:
    def function(x: td.Tensor) -> td.Tensor:
        for _ in range(times):
            x = -x
        return x

    return function


def number(value: Any, shape: tuple[int, ...] = X.shape) -> td.Tensor:
    return constant(value, shape, F32)


def folded(op: Any, a: float, b: float) -> Callable[[td.Tensor], td.Tensor]:
    return lambda x: x + bind1(op, NONE, number(a), number(b))


def padded(low: int, of: Callable[[td.Tensor], td.Tensor]) -> Callable[[td.Tensor], td.Tensor]:
    pad = shaping.Pad((0, low), (0, 0), (0, 0), 7)
    return lambda x: bind1(shaping.PAD, pad, of(x))


def cast(x: td.Tensor, dtype: Any) -> td.Tensor:
    return bind1(e.CAST, Cast(dtype), x)


def scattered(size: int, dtype: Any = I32) -> Callable[[td.Tensor], td.Tensor]:
    def function(x: td.Tensor) -> td.Tensor:
        rows = td.arange(x.shape[0], dtype=dtype)
        return bind1(indexing.SCATTER_ADD, indexing.ScatterAdd(0, size), x, rows)

    return function


LINEAR = linear.Contraction("ab,cb->ac", F32)
NARROW = linear.Contraction("ab,cb->ac", BF16)
TRANSPOSED = linear.Contraction("ab,bc->ac", F32)


def head(spec: Any, widen: Any = None, shared: bool = False) -> Callable[..., Any]:
    def function(x: td.Tensor, weight: td.Tensor, target: td.Tensor) -> Any:
        logits = bind1(linear.CONTRACT, spec, x, weight)
        wide = logits if widen is None else cast(logits, widen)
        rows = losses.cross_entropy(wide, target, reduction="none")
        return [rows, cast(logits, F32)] if shared else rows

    return function


def biased_head(spec: Any, widen: Any = None, axis: int = 1) -> Callable[..., Any]:
    """Logits with a bias of each class, or of each row."""

    def function(x: td.Tensor, weight: td.Tensor, target: td.Tensor, bias: td.Tensor) -> Any:
        logits = bind1(linear.CONTRACT, spec, x, weight)
        spread = bind1(shaping.BROADCAST, shaping.Broadcast(logits.shape, (axis,)), bias)
        added = bind1(e.ADD, NONE, spread, logits)
        wide = added if widen is None else cast(added, widen)
        return losses.cross_entropy(wide, target, reduction="none")

    return function


def types_of_biased_head(dtype: Any = F32) -> list[TensorType]:
    """As many rows as classes: a bias could be of either."""
    shapes = (5, 3), (5, 3)
    rows = [TensorType(shape, dtype) for shape in shapes]
    return [*rows, TensorType((5,), I32), TensorType((5,), dtype)]


FEW = replace(
    GPU,
    rewriting=replace(
        GPU.rewriting, few_scattered=6, many_scattered=4, most_scattered=12, least_sorted=0
    ),
)
LONG = replace(GPU, rewriting=replace(GPU.rewriting, least_arg=4))
BLOCKED = replace(
    GPU, rewriting=replace(GPU.rewriting, scan_parts=16, least_scan_block=4, scanned_row=0)
)
SORTING = replace(GPU.in_order(), rewriting=replace(GPU.rewriting, least_sorted=1))


def added_at(axis: int = 0, is_sorted: bool = False, size: int = 6) -> Callable[..., Any]:
    """Rows or columns added at indices, which may be sorted."""

    def function(x: td.Tensor, target: td.Tensor) -> Any:
        index = td.sort(target)[0] if is_sorted else target
        return bind1(indexing.SCATTER_ADD, indexing.ScatterAdd(axis, size), x, index)

    return function


def types_of_head(dtype: Any = F32, weight: tuple[int, ...] = (5, 3)) -> list[TensorType]:
    return [TensorType((4, 3), dtype), TensorType(weight, dtype), TensorType((4,), I32)]


TARGETS = {"target": np.array([0, 4, 2, 1], np.int32)}
FIVE_TARGETS = {"target": np.array([0, 4, 2, 1, 3], np.int32)}


OF_HEADS = [TensorType((2, 2, 3, 8), BF16)] * 3 + [TensorType((2, 1, 3), BF16)]


def shared_layer(x: td.Tensor) -> td.Tensor:
    return td.tanh(x) * x


def call(x: td.Tensor) -> td.Tensor:
    return td.checkpoint(shared_layer)(x)


def scanned(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The last carry of a scan and its stacks."""

    def function(h: td.Tensor, x: td.Tensor, w: td.Tensor) -> list[td.Tensor]:
        last, stacks = td.scan(lambda c, v: step(c, v, w), h, x, **options)
        return [last, *(stacks if isinstance(stacks, tuple) else (stacks,))]

    return function


def rounded_matmul(c: td.Tensor, w: td.Tensor) -> td.Tensor:
    return cast(cast(c, BF16) @ cast(w[:, :3], BF16), F32)


def spread_slices(h: td.Tensor, x: td.Tensor, w: td.Tensor, of: Callable[..., Any]) -> Any:
    """A scan over (2, 3, n), computed from (2, 3)."""
    slices = of(x)
    start = h[:, None] * w[:, : slices.shape[-1]]
    last, stacked = td.scan(lambda c, v: (c * v[0] + v[1][:, None], c), start, (slices, x))
    return [last, stacked]


LAST_COLUMNS = shaping.Slice((0, 1), (2, 4), (1, 1))
SCANNED = [TensorType((3,), F32), TensorType((2, 3), F32), TensorType((3, 17), F32)]


CASES = {
    "reshape_of_number": Case(
        lambda x: x + reshaped((2, 3))(number(2, (6,))), [lambda x: x + reshaped((2, 3))(x)]
    ),
    "permute_of_number": Case(
        lambda x: x + permuted((1, 0))(number(2, (3, 2))), [lambda x: permuted((1, 0))(x)]
    ),
    "broadcast_of_number": Case(
        lambda x: x + bind1(shaping.BROADCAST, shaping.Broadcast((2, 3), (1,)), number(2, (3,))),
        [padded(1, lambda x: number(2)), padded(1, lambda x: x)],
    ),
    "slice_of_number": Case(
        lambda x: x + view(shaping.SLICE, LAST_COLUMNS)(number(2, (2, 4))),
        [lambda x: view(shaping.SLICE, shaping.Slice((0, 1), (2, 3), (1, 1)))(x)],
    ),
    "flip_of_number": Case(
        lambda x: x + view(shaping.FLIP, shaping.Flip((0,)))(number(2)),
        [view(shaping.FLIP, shaping.Flip((0,)))],
    ),
    "identity_permute": Case(permuted((0, 1)), [permuted((1, 0))]),
    "empty_flip": Case(
        view(shaping.FLIP, shaping.Flip(())), [view(shaping.FLIP, shaping.Flip((0,)))]
    ),
    "identity_reshape": Case(reshaped((2, 3)), [reshaped((3, 2))]),
    "identity_broadcast": Case(
        view(shaping.BROADCAST, shaping.Broadcast((2, 3), (0, 1))),
        [view(shaping.BROADCAST, shaping.Broadcast((2, 3, 2), (0, 1)))],
    ),
    "identity_slice": Case(
        view(shaping.SLICE, shaping.Slice((0, 0), (2, 3), (1, 1))),
        [view(shaping.SLICE, shaping.Slice((0, 0), (2, 2), (1, 1)))],
    ),
    "identity_pad": Case(padded(0, lambda x: x), [padded(1, lambda x: x)]),
    "reshape_back": Case(reshaped((6,), (2, 3)), [reshaped((6,), (3, 2)), reshaped((2, 3))]),
    "row_of_split_axis": Case(
        lambda x: x.reshape(2, 2, 3)[:, 1],
        [
            lambda x: x.reshape(2, 2, 3)[:, :1],  # the axis stays
            lambda x: x.reshape(2, 2, 3)[:, 1, 1:],
            lambda x: x.reshape(2, 2, 3)[1:, 1],
            lambda x: x.reshape(2, 2, 3)[1],  # of the first axis
            lambda x: x.reshape(4, 3)[1],  # two axes are cut
        ],
        (TensorType((2, 6)),),
    ),
    "column_of_split_axis": Case(
        lambda x: x.reshape(2, 2, 3)[:, :, 1],
        [
            lambda x: x.reshape(2, 2, 3)[:, :, 1:],
            lambda x: x.reshape(2, 2, 3)[:, 1:, 1],
            lambda x: x.reshape(2, 2, 3)[:, ::2, 1],
            lambda x: x.reshape(4, 3)[:, 1],
        ],
        (TensorType((2, 6)),),
    ),
    "reshape_of_reshape": Case(
        reshaped((6,), (3, 2)), [lambda x: reshaped((6,))(permuted((1, 0))(x))]
    ),
    "permute_back": Case(
        permuted((1, 2, 0), (2, 0, 1)),
        [permuted((1, 2, 0), (1, 2, 0))],
        [TensorType((2, 3, 4), F32)],
    ),
    "permute_of_permute": Case(
        permuted((1, 2, 0), (1, 2, 0)),
        [lambda x: permuted((1, 0))(reshaped((6, 4))(x))],
        [TensorType((2, 3, 4), F32)],
    ),
    "cast_to_same": Case(lambda x: cast(x, F32), [lambda x: cast(x, BF16)]),
    "double_negation": Case(negated(2), [lambda x: -td.tanh(-x)]),
    "times_one": Case(
        lambda x: [number(1) * x, bind1(e.MUL, NONE, x, number(1))], [lambda x: x * 2]
    ),
    "divided_by_one": Case(
        lambda x: bind1(e.DIV, NONE, x, number(1)), [lambda x: bind1(e.DIV, NONE, number(1), x)]
    ),
    "minus_zero": Case(
        lambda x: bind1(e.SUB, NONE, x, number(0)),
        [
            lambda x: bind1(e.SUB, NONE, x, number(-0.0)),
            lambda x: bind1(e.SUB, NONE, number(0), x),
        ],
    ),
    "fold_sum": Case(folded(e.ADD, 1, 2), [folded(e.ADD, 1, 2**-30), folded(e.ADD, 1, -1)]),
    "fold_difference": Case(folded(e.SUB, 1, 3), [folded(e.SUB, 3, 3), folded(e.ADD, 1, 3)]),
    "fold_product": Case(folded(e.MUL, 3, 5), [folded(e.MUL, 0.1, 3), folded(e.MUL, 0, 3)]),
    "linear_cross_entropy": Case(
        head(LINEAR), [head(LINEAR, shared=True)], types_of_head(), HEADS, TARGETS
    ),
    "rounded_linear_cross_entropy": Case(
        head(NARROW, F32),
        [head(NARROW), head(NARROW, F32, True)],
        types_of_head(BF16),
        HEADS,
        TARGETS,
    ),
    "biased_linear_cross_entropy": Case(
        biased_head(LINEAR),
        [biased_head(LINEAR, axis=0), biased_head(LINEAR, dtypes.float64)],
        types_of_biased_head(),
        HEADS,
        FIVE_TARGETS,
    ),
    "rounded_biased_linear_cross_entropy": Case(
        biased_head(NARROW, F32),
        [biased_head(NARROW), biased_head(NARROW, F32, axis=0)],
        types_of_biased_head(BF16),
        HEADS,
        FIVE_TARGETS,
    ),
    "scatter_in_order": Case(scattered(2), [scattered(4)], target=GPU),
    "scatter_to_table": Case(
        added_at(1),
        [added_at()],
        [TensorType((4, 4), F32), TensorType((4,), I32)],
        SORTING,
        TARGETS,
    ),
    "scatter_in_runs": Case(
        added_at(),
        [added_at(1), added_at(is_sorted=True)],
        [TensorType((4, 4), F32), TensorType((4,), I32)],
        SORTING,
        TARGETS,
    ),
    "running_sum_by_blocks": Case(
        lambda x: td.cumsum(x, 0),
        [lambda x: td.cumsum(x, 1), lambda x: td.cumsum(x[:7], 0)],
        [TensorType((21, 4), F32)],
        BLOCKED,
    ),
    "argmax_of_many": Case(
        lambda x: td.argmax(x, 1),
        [lambda x: td.argmax(x, 0), lambda x: td.argmin(x, 1)],
        [TensorType((3, 4), F32)],
        LONG,
    ),
    "argmin_of_many": Case(
        lambda x: td.argmin(x, 0),
        [lambda x: td.argmin(x, 1), lambda x: td.argmax(x, 0)],
        [TensorType((4, 3), F32)],
        LONG,
    ),
    "cast_back": Case(
        lambda x: cast(cast(x, F32), BF16),
        [lambda x: cast(cast(x, td.float16), BF16), lambda x: cast(cast(x, F32), td.float16)],
        [TensorType((3, 4), BF16)],
    ),
    "scatter_to_few": Case(
        added_at(),
        [added_at(1), added_at(size=7)],
        [TensorType((12, 12), F32), TensorType((12,), I32)],
        FEW,
        {"target": np.array([0, 4, 2, 1, 4, 4, 3, 0, 5, 5, 1, 0], np.int32)},
    ),
    "chosen_gradient": Case(
        lambda x: td.where(x > 0, x, td.stop_gradient(x)),
        [
            lambda x: td.where(x > 0, x, td.stop_gradient(-x)),
            lambda x: td.where(x > 0, td.stop_gradient(x), x),
        ],
    ),
    "inline_call": Case(call, [td.tanh]),
    "recomputed_call": Case(td.grad(lambda x: call(x).sum()), [call]),
    "padded_heads": Case(
        lambda q, k, v: td.attention(q, k, v),
        [lambda q, k, v: td.attention(q, k, q), lambda q, k, v: td.softmax(v)],
        [TensorType((1, 2, 3, n), BF16) for n in (8, 8, 12)],
        replace(GPU, has_attention=True),
    ),
    "max_of_windows": Case(
        lambda x: td.max_pool(x, 2),
        [lambda x: td.avg_pool(x, 2)],
        [TensorType((1, 2, 4, 4), F32)],
    ),
    "computed_behind_scan": Case(
        scanned(lambda c, v, w: (c * v, (v @ w, (c * v).sum() * v, c * v))),
        [
            scanned(lambda c, v, w: (c * v, c * 2)),  # the carry would have to be stacked
            scanned(lambda c, v, w: (c * v, v * 2), recompute=True),
            scanned(lambda c, v, w: (c * v, ((v @ w)[:, None] * v).sum((0, 1)))),
        ],
        SCANNED,
    ),
    "computed_before_scan": Case(
        scanned(lambda c, v, w: (c * 0.5 + td.tanh(v @ w[:, :3]), c), reverse=True),
        [
            scanned(lambda c, v, w: (c * 0.5 + (v * c) @ w[:, :3], c)),
            scanned(lambda c, v, w: (c * 0.5 + v * w[0, 0], c)),
            scanned(lambda c, v, w: (c + (v @ w).sum(), c)),  # seventeen columns for three
            scanned(lambda c, v, w: (c * 0.5 + v @ w[:, :3], c), recompute=True),
        ],
        SCANNED,
    ),
    "stacked_carry": Case(
        scanned(lambda c, v, w: (c * v, (c, c * v)), reverse=True),
        [scanned(lambda c, v, w: (c * v, c)), scanned(lambda c, v, w: (c, (c, v)))],
        SCANNED,
        GPU,
    ),
    "linear_scan_in_blocks": Case(
        scanned(lambda c, v, w: (c * td.tanh(v) + v, c), reverse=True),
        [
            scanned(lambda c, v, w: (c * c + v, c)),
            scanned(lambda c, v, w: (c * v + v, c)),
            scanned(lambda c, v, w: (c * td.tanh(v) + v, c * c)),
            scanned(lambda c, v, w: (td.flip(c, 0) + v, c)),
        ],
        [SCANNED[0], TensorType((9, 3), F32), SCANNED[2]],
        replace(GPU, rewriting=replace(GPU.rewriting, least_blocked_scan=8)),
    ),
    "computed_in_scan": Case(
        lambda h, x, w: spread_slices(h, x, w, lambda x: td.exp(x[:, :, None] * w[0, :8])),
        [
            lambda h, x, w: spread_slices(h, x, w, lambda x: x[:, :, None] * w[0, :2]),
            lambda h, x, w: spread_slices(h, x, w, lambda x: td.flip(x[:, :, None] * w[0, :8], 0)),
        ],
        SCANNED,
        GPU,
    ),
    "rounded_carry": Case(
        scanned(lambda c, v, w: (td.tanh(rounded_matmul(c, w)) + v * c, c), reverse=True),
        [
            scanned(lambda c, v, w: (td.tanh(rounded_matmul(c * v, w)), c)),
            scanned(lambda c, v, w: (td.tanh(c @ w[:, :3]) + v, c)),
            scanned(lambda c, v, w: (c, rounded_matmul(c, w))),
        ],
        SCANNED,
        GPU,
    ),
    "carried_terms": Case(
        lambda h, x, w: [
            *scanned(lambda c, v, w: (rounded_matmul(td.tanh(c), w) + v * c, c))(h, x, w),
            *scanned(lambda c, v, w: (v - 1 + (c * v) @ w[:, :3], v), reverse=True)(h, x, w),
            *scanned(lambda c, v, w: (rounded_matmul(c + v, w), c))(number(0, (3,)), x, w),
        ],
        [
            scanned(lambda c, v, w: (rounded_matmul(c + v, w), c)),  # it may start from anything
            scanned(lambda c, v, w: ((next_ := c @ w[:, :3] + v), next_)),  # it is stacked
            scanned(lambda c, v, w: (td.tanh(c @ w[:, :3]) + v, c)),
        ],
        SCANNED,
        GPU,
    ),
    **{
        f"single_{word}": Case(
            lambda x, op=op: getattr(x.reshape(2, 1, 3), op)(1),
            [lambda x, op=op: getattr(x, op)(1)],
        )
        for word, op in (
            ("sum", "sum"),
            ("maximum", "max"),
            ("minimum", "min"),
        )
    },
    "widened_float8": Case(
        lambda x: in_dtypes(x, dtypes.float8_e4m3, dtypes.float8_e5m2),
        [lambda x: in_dtypes(x, BF16, BF16)],
    ),
    "definition": Case(
        lambda x: td.softmax(x), [td.tanh, td.softmax], keeps=lambda node, types, target: True
    ),
}


def applied(name: str, graph: Graph, case: Case, keeps: Keeps | None = None) -> tuple[Graph, int]:
    """The graph rewritten by one rule, and how often it fired."""
    fired: Counter[str] = Counter()
    only = RuleSet("one", (every_rule()[name],))
    found = rewrite(graph, only, case.target, fired, keeps)
    assert set(fired) <= {name}
    return verify(found), fired[name]


def given_for(case: Case, graph: Graph) -> dict[str, Any] | None:
    return (
        None if case.given is None else {n: case.given[n] for n in case.given if n in graph.leaves}
    )


def test_every_rule_has_its_case() -> None:
    assert set(CASES) == set(every_rule())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_and_changes_no_value(name: str) -> None:
    case = CASES[name]
    graph = td.trace(case.fires, *case.types)
    found, count = applied(name, graph, case)
    assert count
    assert found != graph
    assert equal_graphs(graph, found, given_for(case, graph))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_leaves_near_misses(name: str) -> None:
    case = CASES[name]
    for near in case.misses:
        graph = td.trace(near, *case.types)
        found, count = applied(name, graph, case, case.keeps)
        assert count == 0
        assert found == graph


def test_a_scatter_in_order_stays_where_it_is_cheap_or_the_counter_is_short() -> None:
    case = CASES["scatter_in_order"]
    on_cpu = replace(case, target=CPU)
    assert applied("scatter_in_order", td.trace(case.fires, X), on_cpu)[1] == 0
    rows = TensorType((300, 1), F32)
    wrapped = td.trace(scattered(300, dtypes.uint8), rows)
    assert applied("scatter_in_order", wrapped, case)[1] == 0


@pytest.mark.parametrize("limits", [{"least_classes": 6}, {"least_head_logits": 21}])
def test_small_heads_stay(limits: dict[str, int]) -> None:
    target = replace(HEADS, rewriting=replace(HEADS.rewriting, **limits))
    case = replace(CASES["linear_cross_entropy"], target=target)
    graph = td.trace(case.fires, *case.types)
    assert applied("linear_cross_entropy", graph, case)[1] == 0


def test_a_head_is_a_matmul_by_a_transposed_weight() -> None:
    case = CASES["linear_cross_entropy"]
    graph = td.trace(head(TRANSPOSED), *types_of_head(weight=(3, 5)))
    assert applied("linear_cross_entropy", graph, case)[1] == 0


# The driver


def test_one_pass_is_enough() -> None:
    def function(x: td.Tensor) -> td.Tensor:
        there = permuted((1, 0), (1, 0), (1, 0))(reshaped((6,), (3, 2), (2, 3))(negated(3)(x)))
        return there * 1 / (number(2, (3, 2)) * number(0.5, (3, 2)))

    graph = td.trace(function, X)
    once = canonicalise(graph)
    assert canonicalise(once) == once
    assert equal_graphs(graph, once)
    ops = Counter(n.op.name for n in once.nodes)
    assert ops == {"input": 1, "neg": 1, "permute": 1}


def test_bodies_are_rewritten_too() -> None:
    """Layers of several shapes: each body is its own, and is rewritten once."""

    def function(x: td.Tensor) -> td.Tensor:
        for _ in range(3):
            x = td.max_pool(td.relu(x), 2)
        return td.layer_norm(x.reshape(1, -1))

    graph = td.trace(function, TensorType((1, 3, 8, 8), F32))
    found = verify(expand(graph))
    assert not any(n.op.is_composite for n in found.nodes)
    assert equal_graphs(graph, found)


def test_rules_that_fired_are_counted() -> None:
    fired: Counter[str] = Counter()
    canonicalise(td.trace(lambda x: negated(2)(x) + negated(2)(x * 2) * 1, X), fired)
    assert fired == {"double_negation": 2, "times_one": 1}


def test_a_graph_without_a_rule_stays_itself() -> None:
    graph = td.trace(td.tanh, X)
    assert rewrite(graph, canonical()) is graph


def test_what_is_built_has_the_line_of_what_it_replaces() -> None:
    graph = td.trace(reshaped((6,), (3, 2)), X)
    last = canonicalise(graph).nodes[-1]
    assert last.origin is not None
    assert last.origin == graph.nodes[-1].origin


def test_a_rule_that_gives_another_type_is_refused() -> None:
    permute = every_rule()["identity_permute"]
    wrong = replace(permute, name="wrong", build=take_x, condition=always)
    with pytest.raises(AssertionError, match="wrong gives"):
        rewrite(td.trace(permuted((1, 0)), X), RuleSet("one", (wrong,)))


# Analyses that match patterns and rewrite nothing


def deviations(count: int, axis: int = 0, mean_axis: int = 0) -> Callable[..., Any]:
    def function(x: td.Tensor) -> list[td.Tensor]:
        mean = x.sum(mean_axis) / count
        spread = shaping.Broadcast((6, 6), (1 - mean_axis,))
        gap = x - bind1(shaping.BROADCAST, spread, mean)
        return [mean, (gap * gap).sum(axis)]

    return function


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (deviations(6), 1),
        (deviations(6, axis=1, mean_axis=1), 1),
        (deviations(5), 1),
        (deviations(6, axis=1), 0),
        (lambda x: [((x - x.sum(0) / 6) * (x - 1)).sum(0)], 0),
    ],
)
def test_sums_of_squared_deviations(function: Callable[..., Any], count: int) -> None:
    graph = td.trace(function, TensorType((6, 6), F32))
    found = spreads(graph)
    assert len(found) == count
    for total, mean in found.values():
        assert graph.nodes[total.node].op is reductions.REDUCE_SUM
        assert graph.nodes[mean.node].op is e.DIV


def test_a_graph_is_looked_through_for_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sums it has, and if an equal graph was scheduled before."""
    seen: list[Graph] = []

    def counted(graph: Graph) -> Any:
        seen.append(graph)
        return spreads(graph)

    monkeypatch.setattr(lower, "spreads", counted)
    for _ in range(2):
        wide = TensorType((4096, 1024), F32)
        schedule(td.trace(lambda x: [x.sum(0), (x * x).sum(1), td.exp(x).sum(0)], wide), target=GPU)
    assert len(seen) == 2


ALONG_ROWS = shaping.Broadcast((64, 64), (1,))
ALONG_COLUMNS = shaping.Broadcast((64, 64), (0,))


def biased(spread: Any, shared: bool = False, first: bool = False) -> Callable[..., Any]:
    def function(x: td.Tensor, weight: td.Tensor, bias: td.Tensor) -> list[td.Tensor]:
        matmul = bind1(linear.CONTRACT, NARROW, x, weight)
        terms = [matmul, bind1(shaping.BROADCAST, spread, bias)]
        result = bind1(e.ADD, NONE, *(terms[::-1] if first else terms))
        return [result, matmul] if shared else [result]

    return function


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (biased(ALONG_ROWS), 1),
        (biased(ALONG_ROWS, first=True), 1),
        (biased(ALONG_COLUMNS), 0),
        (biased(ALONG_ROWS, shared=True), 0),
    ],
)
def test_matmuls_with_a_bias(function: Callable[..., Any], count: int) -> None:
    square = TensorType((64, 64), BF16)
    graph = td.trace(function, square, square, TensorType((64,), BF16))
    every = {Value(i): None for i in range(len(graph.nodes))}
    found = matmul_epilogues(graph, every, GPU.matmuls)
    assert len(found) == count
    for matmul, epilogue in found.items():
        assert graph.nodes[matmul.node].op is linear.CONTRACT
        assert graph.nodes[epilogue.sum.node].op is e.ADD
    assert not matmul_epilogues(graph, {}, GPU.matmuls), "a sum that is not materialized"


# Patterns


def test_a_name_stands_for_one_value() -> None:
    square = apply(e.MUL, Anything("x"), Anything("x"))
    for function, expected in ((lambda x: x * x, True), (lambda x: x * td.tanh(x), False)):
        graph = td.trace(function, X)
        found = captures(graph, square, graph.nodes[-1], Counter())
        assert (found is not None) is expected


def test_operands_that_commute_match_in_both_orders() -> None:
    once = apply(e.NEG, Anything("x"), single_use=True)
    pattern = apply(
        e.ADD, once, apply(e.MUL, Number(2), Anything("y"), commutes=True), commutes=True
    )
    orders = in_each_order(pattern)
    assert len(orders) == 4
    assert to_text(orders[0]) == "add(once neg(x), mul(2, y))"
    assert to_text(orders[3]) == "add(mul(y, 2), once neg(x))"
