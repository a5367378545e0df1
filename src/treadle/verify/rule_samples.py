"""Graphs in which rules fire that are written in Python: for proofs, at any sizes.

A sample is a function of tensors with shapes of three sizes. At sizes that stand for symbols the
graph and what the rule makes of it are compared by normal form; at small ones over the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treadle.base.dtypes import bfloat16, float8_e4m3, float32, int32
from treadle.frontend.coerce import cast, constant
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import exp, stop_gradient, tanh, where
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.reductions import argmax, argmin
from treadle.frontend.scopes import bind, bind1
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import trace
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd
from treadle.ir.ops.leaves import IOTA, Iota
from treadle.ir.ops.reductions import CUMSUM, Cumulate
from treadle.ir.types import TensorType
from treadle.kernel.target import CPU, GPU, Target
from treadle.rules.driver import rewrite
from treadle.rules.rule import Rule, RuleSet

Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RuleSample:
    """A function of tensors whose types follow from sizes; indices are below the second size."""

    function: Callable[..., Any]
    types: Callable[[int, int, int], tuple[TensorType, ...]]
    target: Target = GPU
    sizes: tuple[Sizes, ...] = ((2, 5, 3), (1, 4, 2), (3, 6, 4))
    has_symbols: bool = True  # whether it fires at sizes of any kind


def applied(rule: Rule, sample: RuleSample, sizes: Sizes) -> tuple[Graph, Graph]:
    """The graph before and after the rule, which must fire."""
    graph = trace(sample.function, *sample.types(*sizes))
    fired: Counter[str] = Counter()
    found = rewrite(graph, RuleSet("one", (rule,)), sample.target, fired)
    assert fired[rule.name], f"{rule.name} does not fire in its sample at {sizes}"
    return graph, found


def given(graph: Graph, most: int) -> Mapping[str, object]:
    """Values for leaves that are no floats: indices below a size."""
    rng = np.random.default_rng(0)
    types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    return {name: rng.integers(0, most, t.shape) for name, t in types.items() if not t.is_float}


def _all_sizes(**limits: Any) -> Target:
    return replace(GPU, rewriting=replace(GPU.rewriting, **limits))


_HEADS = _all_sizes(least_classes=1, least_head_logits=1)


def _of_head(dtype: Any, is_biased: bool) -> Callable[[int, int, int], tuple[TensorType, ...]]:
    def types(rows: int, classes: int, width: int) -> tuple[TensorType, ...]:
        tensors = [TensorType((rows, width), dtype), TensorType((classes, width), dtype)]
        bias = [TensorType((classes,), dtype)] if is_biased else []
        return (*tensors, TensorType((rows,), int32), *bias)

    return types


def _head(dtype: Any, widen: bool) -> Callable[..., Tensor]:
    def function(x: Tensor, weight: Tensor, target: Tensor, *bias: Tensor) -> Tensor:
        logits = contract(x, weight, ("nd", "vd", "nv"), dtype)
        logits = logits + bias[0] if bias else logits
        logits = cast(logits, float32) if widen else logits
        return bind1(c.CROSS_ENTROPY, c.CrossEntropy(0.0), logits, target)

    return function


def _scattered(size: int | None) -> Callable[..., Tensor]:
    def function(x: Tensor, *index: Tensor) -> Tensor:
        rows = index[0] if index else bind1(IOTA, Iota(0, (x.shape[0],), int32))
        return bind1(SCATTER_ADD, ScatterAdd(0, size or x.shape[0]), x, rows)

    return function


def _matrix(n: int, m: int, k: int) -> tuple[TensorType, ...]:
    return (TensorType((n, m)),)


def _rows_at(n: int, m: int, k: int) -> tuple[TensorType, ...]:
    return TensorType((4 * n, k)), TensorType((4 * n,), int32)


def _heads(n: int, m: int, k: int) -> tuple[TensorType, ...]:
    return tuple(TensorType((n, 2, m, width), bfloat16) for width in (8, 8, 12))


def _scanned(n: int, m: int, k: int) -> tuple[TensorType, ...]:
    return TensorType((m,)), TensorType((k, m)), TensorType((m, m))


def _scan(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def function(h: Tensor, x: Tensor, w: Tensor) -> Any:
        last, stacks = scan(lambda carry, v: step(carry, v, w), h, x, **options)
        return [last, *(stacks if isinstance(stacks, tuple) else (stacks,))]

    return function


def _narrow_matmul(carry: Tensor, w: Tensor) -> Tensor:
    return cast(cast(carry, bfloat16) @ cast(w, bfloat16), float32)


def _spread(h: Tensor, x: Tensor, w: Tensor) -> Any:
    """Slices of many columns that are made of one."""
    columns = constant(1, (64,), float32)
    slices = exp(x[:, :, None] * columns)
    start = h[:, None] * columns
    last, stacked = scan(lambda carry, v: (carry * v, carry), start, slices)
    return [last, stacked]


_LONG, _SORTING = _all_sizes(least_arg=4), _all_sizes(least_sorted=1).in_order()
_FEW = _all_sizes(few_scattered=6, many_scattered=4, most_scattered=12, least_sorted=0)


SAMPLES: dict[str, RuleSample] = {
    "linear_cross_entropy": RuleSample(_head(float32, False), _of_head(float32, False), _HEADS),
    "rounded_linear_cross_entropy": RuleSample(
        _head(bfloat16, True), _of_head(bfloat16, False), _HEADS
    ),
    "biased_linear_cross_entropy": RuleSample(
        _head(float32, False), _of_head(float32, True), _HEADS
    ),
    "rounded_biased_linear_cross_entropy": RuleSample(
        _head(bfloat16, True), _of_head(bfloat16, True), _HEADS
    ),
    "scatter_in_order": RuleSample(_scattered(None), _matrix),
    "scatter_to_few": RuleSample(
        _scattered(3), _rows_at, _FEW, sizes=((2, 3, 3), (3, 3, 1), (4, 3, 2))
    ),
    "running_sum_by_blocks": RuleSample(
        lambda x: bind1(CUMSUM, Cumulate(0, True), x),
        lambda n, m, k: (TensorType((9 * n, k)),),
        _all_sizes(scan_parts=64, least_scan_block=2, scanned_row=0),
        has_symbols=False,
    ),
    "scatter_to_table": RuleSample(
        lambda x, index: bind1(SCATTER_ADD, ScatterAdd(1, 5), x, index),
        lambda n, m, k: (TensorType((n, 4, m, k)), TensorType((4, m), int32)),
        _SORTING,
    ),
    "scatter_in_runs": RuleSample(_scattered(6), _rows_at, _SORTING, has_symbols=False),
    "argmax_of_many": RuleSample(lambda x: argmax(x, 1), _matrix, _LONG),
    "argmin_of_many": RuleSample(lambda x: argmin(x, 1), _matrix, _LONG),
    "max_of_windows": RuleSample(
        lambda x: bind1(c.MAX_POOL, c.Pool((2, 2), (2, 2), (0, 0), (1, 1)), x),
        lambda n, m, k: (TensorType((n, m, 2 * k, 2 * k)),),
    ),
    "chosen_gradient": RuleSample(lambda x: where(x > 0, x, stop_gradient(x)), _matrix),
    "padded_heads": RuleSample(
        lambda q, k, v: list(bind(c.ATTENTION, c.Attention(0.5, True), q, k, v)),
        _heads,
        replace(GPU, has_attention=True),
    ),
    "computed_behind_scan": RuleSample(
        _scan(lambda carry, v, w: (carry * v, (tanh(v @ w), carry * v))),
        _scanned,
        has_symbols=False,
    ),
    "computed_before_scan": RuleSample(
        _scan(lambda carry, v, w: (carry * 0.5 + tanh(v @ w), carry), reverse=True),
        _scanned,
        has_symbols=False,
    ),
    "stacked_carry": RuleSample(
        _scan(lambda carry, v, w: (carry * v, (carry, carry * v)), reverse=True),
        _scanned,
        has_symbols=False,
    ),
    "linear_scan_in_blocks": RuleSample(
        _scan(lambda carry, v, w: (carry * tanh(v) + v, carry), reverse=True),
        _scanned,
        _all_sizes(least_blocked_scan=8),
        sizes=((1, 3, 9), (1, 1, 8), (1, 2, 17)),
        has_symbols=False,
    ),
    "widened_float8": RuleSample(
        lambda x, y: contract(x, y, ("nm", "mk", "nk"), float32),
        lambda n, m, k: (TensorType((n, m), float8_e4m3), TensorType((m, k), float8_e4m3)),
        CPU,
    ),
    "computed_in_scan": RuleSample(_spread, _scanned, has_symbols=False),
    "rounded_carry": RuleSample(
        _scan(lambda carry, v, w: (tanh(_narrow_matmul(carry, w)) + v * carry, carry)),
        _scanned,
        has_symbols=False,
    ),
    "carried_terms": RuleSample(
        lambda h, x, w: _scan(lambda carry, v, w: (_narrow_matmul(carry + v, w), carry))(
            constant(0, h.shape, h.dtype), x, w
        ),
        _scanned,
        has_symbols=False,
    ),
}
